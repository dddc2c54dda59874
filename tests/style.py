"""Checks of the prose in docstrings and comments, and of names: `python -m tests.style`, part of `make check`.

ruff's D401 finds functions whose docstring begins with a noun phrase. These checks find what D401 does not know:

- first words that begin a relative clause or a fragment ("What", "Whether", "Where", "It", …),
- classes, modules and properties that do not begin with a noun phrase,
- words that have a better one in this field, also as a part of a name that a file defines.

Rooms that are not rewritten yet are skipped: those whose `per-file-ignores` in pyproject.toml contain D401.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = ("distnb", "benchmarks", "tests")
NAMES_CHECKED = ("benchmarks", "distnb", "tests")

# No docstring begins with these. "Have the replicas agree …" is an imperative, so "have" is missing.
FRAGMENTS = (
    "what|whatever|whether|how|where|wherever|who|whoever|whom|whose|when|which|why|it|its|that|those|this|these|they|"
    "nor|not|no|nothing|one|as|all|both|some|here|there|of|if|else|only|also|for|from|in|into|on|by|to|with|within|"
    "without|after|before|between|while|until|since|is|has|are|was|does|did"
)
# Docstrings of classes, modules and properties do not begin with these either.
VERBS = "return|returns|raise|raises|yield|yields|stands|keeps|makes|gives|says|takes|holds|sends|have|called"
WRONG_FOR_FUNCTIONS = re.compile(rf"\W*({FRAGMENTS})\b", re.IGNORECASE)
WRONG_FOR_NOUNS = re.compile(rf"\W*({FRAGMENTS}|{VERBS})\b", re.IGNORECASE)

CURES = {
    "function": "Begin with a verb in the imperative (Return, Send, Wait …; a predicate: 'Return whether …').",
    "class": "Begin with a noun phrase that names the class.",
    "module": "Begin with a noun phrase that names the module's content.",
    "property": "Begin with a noun phrase that names the value (a boolean: 'True if …').",
}

# Words that have a better one in this field.
WORDS = {
    r"told|tells?\b(?! apart)": "report, notify or send",
    r"hears?|heard": "receive or handle",
    r"mourn(s|ed|ing)?|bur(y|ies|ied)": "remove or mark lost",
    r"anew": "again, or rebuild",
    r"besides?": "alongside, next to, or in addition to",
    r"kin": "related objects",
    r"of the day": "current",
    r"(brings?|brought|comes?|came) (\w+ )?home": "fetch or return",
    r"lets? go of|let go": "release",
    r"(takes?|took|taken) (it |them )?in\b(?! (turns?|order|place))": "accept, apply or merge",
    r"stands? in for|stand-ins?": "represent or replace",
    r"nor (has|have|had|is|are|does|do|need|can|will|was|were)": "a sentence of its own",
    r"so that nobody": "an active sentence that names the reader or the code",
}
FORBIDDEN = re.compile("|".join(rf"(?P<w{n}>\b(?:{word})\b)" for n, word in enumerate(WORDS)), re.IGNORECASE)
# Prose may use this word; a name may not, because it once had several meanings in names.
NAME_ONLY = re.compile(r"\b(stands?|stood|standing)\b")
WORD_OF_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
QUOTED = re.compile(r"``.*?``|`[^`]*`|\"[^\"\n]*\"|^\s*(>>>|\.\.\.).*$", re.MULTILINE)

Fault = tuple[int, str, str]
"""The line, the text at fault, and the cure."""


def rooms_to_do() -> list[str]:
    """Return the patterns of files that are not rewritten yet, from pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    ignores = settings["tool"]["ruff"]["lint"]["per-file-ignores"]
    return [pattern for pattern, codes in ignores.items() if "D401" in codes]


def files_to_check() -> list[Path]:
    """Return the Python files of the rooms that are finished."""
    to_do = rooms_to_do()
    paths = (path for folder in CHECKED for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in paths if not any(fnmatch(str(path.relative_to(ROOT)), pattern) for pattern in to_do)]


def faults_in(source: str, *, names: bool = False) -> list[Fault]:
    """Return the faults in the docstrings and comments of a module's source, and in the names it defines, by line."""
    nodes = list(ast.walk(ast.parse(source)))
    faults = [*_first_words(nodes), *_forbidden_words(nodes, source)]
    if names:
        faults += {fault for line, name in _names(nodes) if (fault := _name_fault(line, name))}
    return sorted(faults)


def _name_fault(line: int, name: str) -> Fault | None:
    words = " ".join(WORD_OF_NAME.findall(name)).lower()
    found = FORBIDDEN.search(words)
    if not (found or NAME_ONLY.search(words)):
        return None
    better = _better(found) if found else "be, remain or represent"
    return line, name, f"Instead of '{found.group() if found else 'stand'}' name it with the field's word: {better}."


def _names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the names that a module defines: functions, classes, parameters, variables, attributes and aliases."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name


def _first_words(nodes: list[ast.AST]) -> Iterator[Fault]:
    for node in nodes:
        kind = _kind(node)
        if kind is None or (text := ast.get_docstring(node)) is None:  # type: ignore[arg-type]
            continue
        wrong = WRONG_FOR_FUNCTIONS if kind == "function" else WRONG_FOR_NOUNS
        if wrong.match(text):
            yield _docstring_line(node), text.splitlines()[0], CURES[kind]


def _kind(node: ast.AST) -> str | None:
    match node:
        case ast.Module():
            return "module"
        case ast.ClassDef():
            return "class"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return "property" if any(_names_property(each) for each in node.decorator_list) else "function"
    return None


def _names_property(decorator: ast.expr) -> bool:
    name = decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
    return name.endswith("property")


def _docstring_line(node: ast.AST) -> int:
    return node.body[0].lineno  # type: ignore[attr-defined, no-any-return]


def _forbidden_words(nodes: list[ast.AST], source: str) -> Iterator[Fault]:
    lines = source.splitlines()
    texts = list(_docstrings(nodes, lines))
    if any(FORBIDDEN.search(line.partition("#")[2]) for line in lines):  # else no comment has one; tokenizing is slow
        texts += _comments(source)
    for first, text in texts:
        # Code and quotations keep their length, so that a position still says the line.
        prose = QUOTED.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
        for found in FORBIDDEN.finditer(prose):
            line = first + prose.count("\n", 0, found.start())
            yield line, lines[line - 1].strip(), f"Instead of '{found.group()}' use the field's word: {_better(found)}."


def _better(found: re.Match[str]) -> str:
    return list(WORDS.values())[int((found.lastgroup or "w0")[1:])]


def _docstrings(nodes: list[ast.AST], lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield every text that is a statement by itself: docstrings of functions, classes, modules and attributes."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, "\n".join(lines[node.lineno - 1 : node.end_lineno]).replace('"""', "   ")


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def main() -> int:
    """Print each fault as file:line, the text and the cure, and return the exit status."""
    number = 0
    for path in files_to_check():
        source, shown = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        names = shown.parts[0] in NAMES_CHECKED
        faults = faults_in(source, names=names)
        if names and (fault := _name_fault(1, path.stem)):
            faults.insert(0, fault)
        for line, text, cure in faults:
            print(f"{shown}:{line}: {text}\n    {cure}")
        number += len(faults)
    if number:
        print(f"{number} faults of style in docstrings, comments and names.", file=sys.stderr)
    return 1 if number else 0


if __name__ == "__main__":
    sys.exit(main())

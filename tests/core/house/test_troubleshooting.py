"""The errors quoted in docs/troubleshooting.md match the source."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from distnb import errors

ROOT = Path(__file__).parents[3]
QUOTED = re.findall(
    r"```text\n(\w+): (.*?)\n```",
    (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"),
    flags=re.DOTALL,
)


def said(node: ast.expr) -> str:
    """Return a literal's text, with "…" in the place of each inserted value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(said(part) for part in node.values) if isinstance(node, ast.JoinedStr) else "…"


@cache
def texts() -> tuple[str, ...]:
    def of_each_file() -> Iterator[str]:
        for path in sorted((ROOT / "distnb").rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                    yield said(node)

    return tuple(of_each_file())


def test_the_page_quotes_many_messages() -> None:
    assert len(QUOTED) > 40
    assert len({text for _, text in QUOTED}) == len(QUOTED)


@pytest.mark.parametrize(("error", "text"), QUOTED, ids=[text[:40] for _, text in QUOTED])
def test_each_quoted_message_is_in_the_source(error: str, text: str) -> None:
    assert error in errors.__all__ or hasattr(builtins, error)
    assert any(text in each for each in texts())

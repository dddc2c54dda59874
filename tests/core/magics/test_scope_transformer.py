"""The place and the line numbers of the body of `with strategy.scope():` at the top level of a cell."""

from __future__ import annotations

import ast
import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from distnb.errors import ContextError
from distnb.magics.scope_transformer import ScopeDispatch, ScopeTransformer
from distnb.notebook.remote_runtime import RemoteScope
from distnb.options import StrategySpec
from distnb.strategies.strategy_scope import StrategyScope
from distnb.wire.messages import UsersFunction


class FakeStrategy:
    """A strategy whose scope is remote or local as requested, and which is its own runtime."""

    spec = StrategySpec(kind="mirrored")

    def __init__(self, remote: bool) -> None:
        self.is_remote = remote
        self.scopes = 0
        self.runtime = FakeRuntime(self)

    def scope(self, *arguments: Any) -> Any:
        self.scopes += 1
        return StrategyScope(self)


class FakeRuntime:
    def __init__(self, strategy: FakeStrategy) -> None:
        self.strategy = strategy

    @property
    def is_remote(self) -> bool:
        return self.strategy.is_remote

    def scope(self) -> Any:
        return RemoteScope() if self.is_remote else self._local()

    @contextmanager
    def _local(self) -> Iterator[Any]:
        self.strategy.inside = True
        yield self.strategy
        self.strategy.inside = False


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell()
    made.sent = []
    dispatch = ScopeDispatch(lambda source, spec, filename, function: made.sent.append((source, spec, filename)))
    dispatch.install(made)
    made.ast_transformers.append(ScopeTransformer())
    made.user_ns["here"] = FakeStrategy(remote=False)
    made.user_ns["there"] = FakeStrategy(remote=True)
    yield made
    made.history_manager.end_session()
    made.history_manager.close()
    atexit.unregister(made.atexit_operations)  # it would clear itself again, slowly


def run(shell: InteractiveShell, source: str) -> Any:
    result = shell.run_cell(source)
    result.raise_error()
    return result


def test_a_remote_body_is_sent_with_its_lines(shell: InteractiveShell) -> None:
    run(shell, "before = 1\n\nwith there.scope():\n    a = 1\n    b = 2  # why\nafter = 2")
    ((source, spec, filename),) = shell.sent
    assert source == "\n\nwith there.scope():\n    a = 1\n    b = 2  # why\n"
    assert spec == StrategySpec(kind="mirrored")
    assert filename.startswith("<ipython-input") or filename.endswith(".py")
    assert shell.user_ns["before"] == 1
    assert shell.user_ns["after"] == 2
    assert "a" not in shell.user_ns
    assert shell.user_ns["there"].scopes == 1


def test_a_local_body_runs_in_the_notebook(shell: InteractiveShell) -> None:
    run(shell, "with here.scope() as s:\n    a = s.inside")
    assert shell.user_ns["a"] is True
    assert shell.user_ns["here"].inside is False
    assert shell.user_ns["here"].scopes == 1
    assert shell.sent == []


@pytest.mark.parametrize(
    "statement",
    [
        "with there.scope(): a = 1",
        "with there.scope() as s, open('/dev/null') as f:\n    a = 1",
        "with open('/dev/null') as f, there.scope():\n    a = 1",
        "with (\n    there.scope() as s,\n    open('/dev/null'),\n):\n    text = '''\nnot indented\n'''\n    a = 1",
        "with there.scope():\n    with open('x'):\n        pass",
    ],
)
def test_all_forms_are_sent_unchanged(shell: InteractiveShell, statement: str) -> None:
    run(shell, f"x = 0\n{statement}\ny = 1")
    ((source, _, _),) = shell.sent
    assert source == f"\n{statement}\n"
    ast.parse(source)
    assert shell.user_ns["y"] == 1


def test_the_receiver_may_be_any_expression(shell: InteractiveShell) -> None:
    shell.user_ns["made"] = []
    run(shell, "def make():\n    made.append(1)\n    return there\nwith make().scope():\n    a = 1")
    assert len(shell.sent) == 1
    assert shell.user_ns["made"] == [1]


def pretend(shell: InteractiveShell) -> None:
    """Run here what would be sent, as the replicas would."""

    def run_here(source: str, spec: StrategySpec, filename: str, function: UsersFunction | None) -> None:
        shell.sent.append((source, spec, filename))
        shell.user_ns["there"].is_remote = False
        try:
            exec(compile(source, filename, "exec"), shell.user_ns)
        finally:
            shell.user_ns["there"].is_remote = True

    ScopeDispatch(run_here).install(shell)


FUNCTION = """
def train(width, there):
    seen, other = [], 5
    try:
        with there.scope() as s:
            model = [width, scale]
            seen.append(s.inside)
            import math as m
            squares = [i * i for i in range(3)]
            def helper(x):
                inner = x + width
                return inner
            if width > 100:
                never = 1
    finally:
        done = True
    return model, seen, m.floor(1.5), squares, helper(1), sorted(locals())
"""


def test_a_block_in_a_function_gets_locals_and_returns_assigned_names(shell: InteractiveShell) -> None:
    pretend(shell)
    run(shell, f"scale = 3\nmodel = 'global'\n{FUNCTION}\nfound = train(4, there)\nlocally = train(4, here)")
    for name in ("found", "locally"):
        model, seen, m, squares, helped, names = shell.user_ns[name]
        assert (model, seen, m, squares, helped) == ([4, 3], [True], 1, [0, 1, 4], 5)
        assert set(names) - {"_scope_"} == {
            *["done", "helper", "m", "model", "other", "s", "seen", "squares", "there", "width"]
        }
    assert shell.user_ns["model"] == "global"
    assert len(shell.sent) == 1
    assert not [name for name in shell.user_ns if name.startswith(("_given_", "_made_", "_block_"))]


def test_the_lines_of_a_function_are_those_of_the_cell(shell: InteractiveShell) -> None:
    pretend(shell)
    result = shell.run_cell("def f():\n    with there.scope():\n        a = 1\n        1 / 0\nf()")
    traceback = result.error_in_exec.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback.tb_lineno == 4


def test_methods_and_functions_in_functions(shell: InteractiveShell) -> None:
    pretend(shell)
    text = (
        "class Trainer:\n    def __init__(self, strategy):\n        self.strategy = strategy\n"
        "    def build(self, n):\n        def inner():\n            with self.strategy.scope():\n"
        "                self.model = n\n                out = n + 1\n            return out\n        return inner()\n"
        "t = Trainer(there)\nn = t.build(2)"
    )
    run(shell, text)
    assert (shell.user_ns["n"], shell.user_ns["t"].model) == (3, 2)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("return", "def f():\n    with there.scope():\n        return 1\nf()"),
        ("yield", "def f():\n    with there.scope():\n        yield 1\nlist(f())"),
        ("break", "def f():\n    for i in [1]:\n        with there.scope():\n            break\nf()"),
        ("break", "for i in [1]:\n    with there.scope():\n        break"),
        ("del", "def f():\n    x = 1\n    with there.scope():\n        del x\nf()"),
        ("global", "def f():\n    global g\n    with there.scope():\n        g = 1\nf()"),
        (
            "nonlocal",
            "def f():\n    x = 1\n    with there.scope():\n        def g():\n            nonlocal x\n            x = 2\nf()",
        ),
    ],
)
def test_statements_of_the_enclosing_code_are_refused_with_the_cure(
    shell: InteractiveShell, word: str, text: str
) -> None:
    with pytest.raises(ContextError, match=f"contains a `{word}`.*%%distribute"):
        run(shell, text)
    assert shell.sent == []
    run(shell, text.replace("there", "here"))


def test_statements_within_the_block_are_allowed(shell: InteractiveShell) -> None:
    pretend(shell)
    text = (
        "def f():\n    with there.scope():\n        for i in range(3):\n            if i:\n                break\n"
        "        def g():\n            return i\n    return g()\nn = f()"
    )
    run(shell, text)
    assert shell.user_ns["n"] == 1


def test_a_syntax_error_is_reported_and_later_scopes_are_sent(shell: InteractiveShell) -> None:
    result = shell.run_cell("def f():\n    with there.scope():\n        x = 1\n        global x\n")
    assert isinstance(result.error_before_exec or result.error_in_exec, SyntaxError)
    run(shell, "with there.scope():\n    a = 1")
    assert len(shell.sent) == 1


@pytest.mark.parametrize("around", ["if True:", "for i in [1]:", "try:", "while 'a' not in dir():", "with nothing():"])
def test_a_scope_may_be_nested_in_a_statement(shell: InteractiveShell, around: str) -> None:
    pretend(shell)
    end = "\nfinally:\n    pass" if around == "try:" else ""
    run(
        shell,
        f"from contextlib import nullcontext as nothing\n{around}\n    with there.scope():\n        a = 1{end}\nb = a",
    )
    assert shell.user_ns["b"] == 1
    ((source, _, _),) = shell.sent
    assert source.splitlines()[2:] == ["    with there.scope():", "        a = 1"]


def test_a_scope_in_a_module_raises_with_the_cure(shell: InteractiveShell) -> None:
    exec("def f():\n    with there.scope():\n        pass", shell.user_ns)
    with pytest.raises(ContextError, match="%%distribute"):
        run(shell, "f()")


@pytest.mark.parametrize(
    "statement",
    [
        "with scope:",
        "with scope as s:",
        "with holder.scope as s:",
        "with (there.scope() if True else None) as s:",
        "with (s := there.scope()):",
        "with open('/dev/null'), scope:",
    ],
)
def test_a_scope_may_have_a_name(shell: InteractiveShell, statement: str) -> None:
    run(shell, "from types import SimpleNamespace\nscope = there.scope()\nholder = SimpleNamespace(scope=scope)")
    run(shell, f"{statement}\n    a = 1")
    ((source, _, _),) = shell.sent
    assert source == f"{statement}\n    a = 1\n"
    pretend(shell)
    run(shell, f"def f(scope):\n    {statement}\n        a = 2\n    return a\nfound = f(scope), f(scope)")
    assert shell.user_ns["found"] == (2, 2)


def test_other_context_managers_are_entered_in_the_notebook(shell: InteractiveShell) -> None:
    text = "import threading\nlock = threading.Lock()\nscope = here.scope()\n"
    run(shell, text + "with lock as got:\n    held = lock.locked()\nwith scope as s, lock:\n    inside = s.inside\n")
    assert (shell.user_ns["got"], shell.user_ns["held"], shell.user_ns["inside"]) == (True, True, True)
    assert shell.sent == []


@pytest.mark.parametrize(
    "statement",
    ["ExitStack().enter_context(there.scope())", "there.scope()(print)()", "there.scope().__enter__()"],
)
def test_a_scope_entered_without_a_block_raises_with_the_cure(shell: InteractiveShell, statement: str) -> None:
    with pytest.raises(ContextError, match=r"enter_context.*write `with strategy\.scope"):
        run(shell, f"from contextlib import ExitStack\n{statement}")


CAPTURING = """
def program(there):
    rate, model = 1, None
    def predict(x):
        return model + x
    def by_another(x):
        return predict(x)
    def scaled(x):
        return rate * x
    with there.scope():
        model = 10
        found = {used}
    return found, predict(1)
"""


def test_a_function_that_uses_names_of_the_block_is_refused(shell: InteractiveShell) -> None:
    pretend(shell)
    for used in ("predict(1)", "by_another(1)", "list(map(predict, [1]))"):
        with pytest.raises(ContextError, match=r"assigns 'model', and uses 'predict'.*within the block"):
            run(shell, CAPTURING.format(used=used) + "program(there)")
        run(shell, CAPTURING.format(used=used) + "program(here)")
    assert shell.sent == []
    run(shell, CAPTURING.format(used="scaled(2)") + "found = program(there)")
    assert shell.user_ns["found"] == (2, 11)


def test_other_with_statements_are_unchanged() -> None:
    for text in ("with open('x') as f:\n    pass", "with a.scope(1):\n    pass", "with scope():\n    pass", "x = 1"):
        tree = ast.parse(text)
        assert ast.dump(ScopeTransformer().visit(ast.parse(text))) == ast.dump(tree)


def test_errors_have_the_cells_lines(shell: InteractiveShell) -> None:
    result = shell.run_cell("x = 1\nwith here.scope():\n    1 / 0\n")
    traceback = result.error_in_exec.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback.tb_lineno == 3


def test_a_block_without_source_text_is_regenerated(shell: InteractiveShell) -> None:
    tree = ScopeTransformer().visit(ast.parse("with there.scope():\n    a = 1  # a comment"))
    exec(compile(ast.fix_missing_locations(tree), "<nowhere>", "exec"), shell.user_ns)
    ((source, _, _),) = shell.sent
    assert source == "with there.scope():\n    a = 1"


def test_several_scopes_in_a_cell_run_in_order(shell: InteractiveShell) -> None:
    run(shell, "with there.scope():\n    a = 1\nwith here.scope():\n    b = 2\nwith there.scope():\n    c = 3")
    assert [source.lstrip("\n") for source, _, _ in shell.sent] == [
        "with there.scope():\n    a = 1\n",
        "with there.scope():\n    c = 3\n",
    ]
    assert shell.user_ns["b"] == 2

"""`with strategy.scope():` at the top level of a cell: who gets the body, and with which line numbers."""

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
from distnb.options import StrategySpec
from distnb.session.remote import RemoteScope


class FakeStrategy:
    """Its scope is remote or local, as it is told."""

    spec = StrategySpec("mirrored")

    def __init__(self, remote: bool) -> None:
        self.remote = remote
        self.scopes = 0

    def scope(self, *arguments: Any) -> Any:
        self.scopes += 1
        return RemoteScope(self) if self.remote else self._local()

    @contextmanager
    def _local(self) -> Iterator[Any]:
        self.inside = True
        yield self
        self.inside = False


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell()
    made.sent = []
    dispatch = ScopeDispatch(lambda source, spec, filename: made.sent.append((source, spec, filename)))
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
    assert spec == StrategySpec("mirrored")
    assert filename.startswith("<ipython-input") or filename.endswith(".py")
    assert shell.user_ns["before"] == 1
    assert shell.user_ns["after"] == 2
    assert "a" not in shell.user_ns
    assert shell.user_ns["there"].scopes == 1


def test_a_local_body_runs_here(shell: InteractiveShell) -> None:
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
def test_all_forms_are_sent_as_they_stand(shell: InteractiveShell, statement: str) -> None:
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


def test_inside_a_function_it_raises_with_the_cure(shell: InteractiveShell) -> None:
    with pytest.raises(ContextError, match="%%distribute"):
        run(shell, "def f():\n    with there.scope():\n        pass\nf()")


def test_inside_an_if_it_raises_too(shell: InteractiveShell) -> None:
    with pytest.raises(ContextError):
        run(shell, "if True:\n    with there.scope():\n        pass")


def test_other_withs_are_left_alone() -> None:
    for text in ("with open('x') as f:\n    pass", "with a.scope(1):\n    pass", "with scope():\n    pass", "x = 1"):
        tree = ast.parse(text)
        assert ast.dump(ScopeTransformer().visit(ast.parse(text))) == ast.dump(tree)


def test_errors_have_the_cells_lines(shell: InteractiveShell) -> None:
    result = shell.run_cell("x = 1\nwith here.scope():\n    1 / 0\n")
    traceback = result.error_in_exec.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback.tb_lineno == 3


def test_where_the_text_is_not_to_be_found_it_is_written_anew(shell: InteractiveShell) -> None:
    tree = ScopeTransformer().visit(ast.parse("with there.scope():\n    a = 1  # a comment"))
    exec(compile(ast.fix_missing_locations(tree), "<nowhere>", "exec"), shell.user_ns)
    ((source, _, _),) = shell.sent
    assert source == "with there.scope():\n    a = 1"


def test_several_in_one_cell_in_order(shell: InteractiveShell) -> None:
    run(shell, "with there.scope():\n    a = 1\nwith here.scope():\n    b = 2\nwith there.scope():\n    c = 3")
    assert [source.lstrip("\n") for source, _, _ in shell.sent] == [
        "with there.scope():\n    a = 1\n",
        "with there.scope():\n    c = 3\n",
    ]
    assert shell.user_ns["b"] == 2

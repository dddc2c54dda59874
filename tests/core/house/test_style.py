"""The checks of docstrings, comments and names (`make style`): each detects its faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import style


@pytest.mark.parametrize(
    "source",
    [
        '"""What a module does."""',
        'def f():\n    """Whether it is so."""',
        'async def f():\n    """Where it lies."""',
        'class C:\n    """Stands for another object."""',
        'class C:\n    """Return the number."""',
        'class C:\n    @property\n    def p(self):\n        """Whether it is ready."""',
        'class C:\n    @functools.cached_property\n    def p(self):\n        """Return the number."""',
        'class C:\n    a: int\n    """The engines that were told."""',
        "x = 1  # Nor has it engines.",
        'def f():\n    """Send the program.\n\n    The engines hear of it.\n    """',
    ],
)
def test_a_fault_is_detected(source: str) -> None:
    assert style.faults_in(source)


def test_a_fault_names_its_line_and_a_cure() -> None:
    [(line, text, cure)] = style.faults_in('def f():\n    """Send it.\n\n    The group of the day.\n    """')
    assert (line, text) == (4, "The group of the day.")
    assert "current" in cure


@pytest.mark.parametrize(
    "source",
    [
        '"""Messages between notebook and engines."""',
        'def f():\n    """Return whether the engine is alive."""',
        'def f():\n    """Have every replica agree on a file."""',
        'class C:\n    """A pending call."""\n\n    @property\n    def p(self):\n        """True if the call has ended."""',
        'def f():\n    """Call `tell` of the file object.\n\n    >>> file.tell()\n    """',
    ],
)
def test_plain_sentences_pass(source: str) -> None:
    assert style.faults_in(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "def tell(): ...",
        "class ToldOfBatch: ...",
        "def f(beside): ...",
        "was_told = 1",
        "self.let_go = 1",
        "import numpy as kin",
        "for each_heard in []: ...",
        "async def take_in(): ...",
        "class StandIn: ...",
    ],
)
def test_a_forbidden_word_in_a_name_is_detected(source: str) -> None:
    assert style.faults_in(source, names=True)
    assert not style.faults_in(source)


@pytest.mark.parametrize(
    "source", ["standard = shear = retold = 1", "def tell_apart(): ...", "file.tell()", "f(told=1)"]
)
def test_other_names_pass(source: str) -> None:
    assert style.faults_in(source, names=True) == []


def test_faults_are_reported_with_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(style, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('tool.ruff.lint.per-file-ignores."distnb/old/**" = ["D401"]')
    for name in ("distnb/new.py", "distnb/old/what.py", "tests/sent.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('"""Fine."""')
    assert style.main() == 0
    (tmp_path / "distnb/old/what.py").write_text('"""What is not rewritten yet."""')
    assert style.main() == 0
    (tmp_path / "distnb/new.py").write_text('hears = 1\n"""The engines hear of it."""')
    (tmp_path / "tests/told.py").write_text("hears = 1")
    capsys.readouterr()
    assert style.main() == 1
    shown = capsys.readouterr()
    assert [line.split(": ")[0] for line in shown.out.splitlines()[::2]] == [
        "distnb/new.py:1",
        "distnb/new.py:2",
        "tests/told.py:1",
        "tests/told.py:1",
    ]
    assert "4 faults" in shown.err

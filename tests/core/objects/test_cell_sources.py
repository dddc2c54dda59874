"""The sources of cells: each code object has its own."""

from __future__ import annotations

import linecache

import pytest

from distnb.objects.code.definitions import source_of


def test_equal_code_in_two_cells_keeps_its_own_source(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []
    for name, above in (("<equal code 1>", "# one"), ("<equal code 2>", "# two")):
        text = f"{above}\ndef f():\n    return 1\n"
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
        names: dict[str, object] = {}
        exec(compile(text, name, "exec"), names)
        codes.append(names["f"].__code__)  # type: ignore[attr-defined]
    assert codes[0] == codes[1]
    assert [(source_of(code) or ("", ""))[1][:5] for code in codes] == ["# one", "# two"]

"""The sources of cells: each code object has its own."""

from __future__ import annotations

import io
import linecache
import pickle

import pytest

from distnb.objects.code.definitions import CodePickler, source_of


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


def test_a_function_sent_by_value_names_its_file() -> None:
    names: dict[str, object] = {}
    exec(compile("def f():\n    return lambda: 1\n", "<a cell>", "exec"), names)
    file = io.BytesIO()
    CodePickler(file, protocol=5).dump(names["f"])
    found = pickle.loads(file.getvalue())
    assert (found.__code__.co_filename, found().__code__.co_filename) == ("<a cell>", "<a cell>")

"""Arrays on memory-mapped files: mapped again on the other side if the file is there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from distnb.errors import CannotTravelError
from tests.support.worlds import Cell, DoubleWorld, PlainWorld, compare, distributed, ordinary, run_all

SHOW = "seen = type(m).__name__, m.mode, str(m.filename), m.flags.writeable, m.tolist()"
SEQUENCES: dict[str, list[Cell]] = {
    "read": [
        ordinary("m = np.memmap(path, 'f4', 'r', offset=8, shape=(2, 3), order='F')"),
        distributed(SHOW),
        ordinary(f"before = seen\n{SHOW}"),
    ],
    "written to": [
        ordinary("m = np.memmap(path, 'f4', 'r+', shape=(5,))\nv = m[1::2]\na = np.asarray(m)\nm[0] = 7"),
        distributed("m[1] = m[0]\nv[1] = 9\nx = m.tolist(), a.tolist(), type(a).__name__, type(v).__name__, v.mode"),
        ordinary("y = m.tolist(), v.tolist()\nm[2] = 5"),
        distributed("z = v.tolist(), a.tolist(), np.may_share_memory(v, m)"),
    ],
    "made there": [
        distributed("m = np.memmap(path, 'f4', 'w+', shape=(4,))\nm[:] = 3\nm.flush()"),
        ordinary("x = np.fromfile(path, 'f4').tolist()"),
        distributed("y = m.tolist()"),
    ],
    "held by others": [
        ordinary("m = np.memmap(path, 'f4', 'r+', shape=(4,))\nbag = {'m': m, 'rows': m.reshape(2, 2)[1]}"),
        distributed("bag['rows'][0] = 8\nbag['n'] = bag['m'].sum().item()"),
        ordinary("x = bag['n'], m.tolist(), bag['m'] is m"),
    ],
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    name = str(tmp_path / "data.bin")
    np.arange(10, dtype="f4").tofile(name)
    return name


@pytest.mark.parametrize("name", SEQUENCES)
def test_mapped_files_behave_as_in_one_ipython(name: str, path: str) -> None:
    plain, world = PlainWorld(), DoubleWorld(2)
    for each in (plain, world):
        np.arange(10, dtype="f4").tofile(path)
        run_all(each, [ordinary(f"import numpy as np\npath = {path!r}"), *SEQUENCES[name]])
    compare(plain.names(), world.names())


def test_copy_on_write_arrays_are_sent_by_value(path: str) -> None:
    world = DoubleWorld(2)
    made = f"import numpy as np\nm = np.memmap({path!r}, 'f4', 'c', shape=(3,))\nm[0] = 100\nkept = m"
    run_all(world, [ordinary(made), distributed("x = float(m[0])\nm[1] = 200"), ordinary("same = kept is m")])
    names = world.names()
    assert (names["x"], names["m"].tolist(), names["same"]) == (100, [100, 200, 2], True)
    assert np.fromfile(path, "f4")[:3].tolist() == [0, 1, 2]


def test_a_large_file_is_not_sent(path: str) -> None:
    os.truncate(path, 8 << 20)
    world = DoubleWorld(1)
    run_all(world, [ordinary(f"import numpy as np\nm = np.memmap({path!r}, 'u1', 'r+')"), distributed("n = m.nbytes")])
    run_all(world, [ordinary("m[0] = 1"), distributed("n = int(m[0])")])
    assert world.sent_nbytes < 20_000
    assert world.names()["n"] == 1


@pytest.mark.parametrize("lost", ["no such file", "size or time differ"])
def test_a_file_missing_on_the_engines_machine_is_an_error(
    path: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = DoubleWorld(1)
    run_all(world, [ordinary(f"import numpy as np\nm = np.memmap({path!r}, 'f4', 'r')\nxs = [1]")])
    world.namespaces[0].open = _elsewhere(world.namespaces[0].open, path, lost)  # type: ignore[method-assign]
    with pytest.raises(CannotTravelError, match=rf"(?s){path}.*The cure: copy the file here.*numpy\.array"):
        run_all(world, [distributed("m.sum()")])
    run_all(world, [distributed("if not xs:\n    m\nn = 1"), ordinary("whole = m.sum().item()")])
    assert (world.names()["n"], world.names()["whole"]) == (1, 45)


def _elsewhere(open_snapshot, path: str, lost: str):  # type: ignore[no-untyped-def]
    """Open snapshots as on a machine where the file is missing or different."""

    def opened(*args: object) -> None:
        there = f"{path}.kept"
        os.rename(path, there)
        if lost != "no such file":
            Path(path).write_bytes(b"other")
        try:
            open_snapshot(*args)
        finally:
            os.rename(there, path)

    return opened


def test_an_unnamed_file_is_sent_by_value(path: str) -> None:
    world = DoubleWorld(1)
    run_all(world, [ordinary(f"import numpy as np, os\nm = np.memmap({path!r}, 'f4', 'r')\nos.unlink({path!r})")])
    run_all(world, [distributed("n = float(m.sum())")])
    assert world.names()["n"] == 45

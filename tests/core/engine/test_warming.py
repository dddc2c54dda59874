"""The modules that an idle engine loads: on the main thread, without delaying more than one program at a time."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from distnb.engine import warming

NAMES = ("warmed_first", "warmed_broken", "warmed_second")


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_IDLE_S", 0.0)
    monkeypatch.syspath_prepend(tmp_path)
    for name in NAMES:
        text = "raise RuntimeError" if "broken" in name else "import threading\nthread = threading.get_ident()\n"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)


def loaded() -> tuple[str, ...]:
    return tuple(name for name in NAMES if name in sys.modules)


def test_programs_run_between_modules():
    seen = []

    async def programs() -> None:
        warming.warm_up_when_idle(lambda: 1.0, NAMES)
        while "warmed_second" not in sys.modules:
            seen.append(loaded())
            await asyncio.sleep(0)

    asyncio.run(programs())
    assert ("warmed_first",) in seen
    assert loaded() == ("warmed_first", "warmed_second")  # a module that cannot be loaded does not prevent the others
    assert {sys.modules[name].thread for name in loaded()} == {threading.get_ident()}


def test_no_module_is_loaded_while_a_program_runs():
    async def program() -> None:
        idle_s = 0.0
        warming.warm_up_when_idle(lambda: idle_s, NAMES)
        for _ in range(50):  # it runs the event loop
            await asyncio.sleep(0)
        assert loaded() == ()
        idle_s = 1.0
        while "warmed_second" not in sys.modules:
            await asyncio.sleep(0)

    asyncio.run(program())

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import pytest

from distnb import cli
from distnb.cluster.local import capacity, machine_check
from distnb.errors import StartError


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str]]:
    """Return the exit status, and the lines by resource."""
    status = cli.main(["check", *words])
    lines = capsys.readouterr().out.splitlines()
    return status, {line[2:13].strip(): line for line in lines}


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv(capacity.CAP_VARIABLE, raising=False)
    monkeypatch.setattr(capacity, "CAP_FILE", tmp_path / "max_engines")


def test_a_machine_that_can_run_engines_is_green(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = check(capsys)
    assert list(lines) == ["versions", "cores", "memory", "/dev/shm", "open files", "GPUs", "ports"]
    assert [line for line in lines.values() if not line.startswith("✓ ")] == []
    assert status == 0
    assert re.search(r"Python \d.*distnb \d.*torch \d.*ipython \d.*ipykernel \d.*ipyparallel \d", lines["versions"])
    assert "none" in lines["GPUs"]
    assert check(capsys, "-n", "1")[0] == 0


def _refuse(*arguments: object) -> None:
    raise StartError("ip link set lo up")


@pytest.mark.parametrize(
    ("what", "broken", "cure"),
    [
        ("versions", (machine_check, "version_here", lambda name: "1.0"), "pip install .*'torch"),
        ("cores", (capacity, "cores", lambda: 1), "40 engines .* 1 core.* Start fewer"),
        ("memory", (capacity, "available_nbytes", lambda: 2**30), "40 engines .* 4,000 MiB .* 1,024 MiB"),
        ("/dev/shm", (machine_check, "_SHARED", "/missing"), "0 MiB.*--shm-size"),
        ("open files", (resource, "getrlimit", lambda which: (64, 64)), "open files .*ulimit -Hn"),
        ("GPUs", (machine_check, "available_gpus", lambda: 3), "3 GPUs, and torch finds 0"),
        ("ports", (machine_check, "require_loopback", _refuse), "ip link set lo up"),
    ],
)
def test_a_missing_resource_comes_with_its_cure(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    broken: tuple[Any, str, Any],
    cure: str,
) -> None:
    monkeypatch.setattr(*broken)
    status, lines = check(capsys, "-n", "40")
    assert status == 1
    assert lines[what].startswith("✗ ")
    assert re.search(cure, lines[what])
    assert set(lines) == {"versions", "cores", "memory", "/dev/shm", "open files", "GPUs", "ports"}

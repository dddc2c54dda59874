"""The number of engines that a machine can run."""

from __future__ import annotations

from pathlib import Path

import pytest

import distnb
from distnb.cluster.local import capacity
from distnb.cluster.local.capacity import CAP_VARIABLE, ENGINE_NBYTES, Capacity, check_capacity, this_machine
from distnb.errors import StartError

GIB = 2**30


@pytest.fixture(autouse=True)
def no_administrator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv(CAP_VARIABLE, raising=False)
    monkeypatch.setattr(capacity, "CAP_FILE", tmp_path / "max_engines")
    return tmp_path / "max_engines"


@pytest.mark.parametrize(
    ("engines", "cores", "noticed"),
    [(2, 2, False), (3, 2, True), (8, 2, True), (8, 1, True), (16, 8, True), (16, 16, False)],
)
def test_more_engines_than_cores_start_with_a_notice(engines: int, cores: int, noticed: bool) -> None:
    room = Capacity(cores=cores, memory_nbytes=64 * GIB)
    notices = check_capacity(engines, room, "gpu1", oversubscribe=False)
    assert len(notices) == noticed
    for notice in notices:
        assert f"{engines} engines share the {cores} core" in notice
        assert "of gpu1" in notice


@pytest.mark.parametrize(("engines", "cores"), [(9, 2), (200, 2), (9, 4), (17, 8)])
def test_far_more_engines_than_cores_are_refused_with_the_figures(engines: int, cores: int) -> None:
    room = Capacity(cores=cores, memory_nbytes=64 * GIB)
    with pytest.raises(
        StartError, match=rf"^{engines} engines were asked for on a machine with {cores} cores.*--overs"
    ):
        check_capacity(engines, room, oversubscribe=False)
    check_capacity(engines, room, oversubscribe=True)
    with pytest.raises(StartError, match=r"Give a smaller number\. .*started with oversubscribe=True") as resized:
        check_capacity(engines, room, oversubscribe=False, running=1)
    assert "--oversubscribe" not in str(resized.value), "%distnb resize has no such option"


def test_more_engines_than_memory_allows_are_refused_with_the_figures() -> None:
    room = Capacity(cores=16, memory_nbytes=4 * ENGINE_NBYTES - 1)
    check_capacity(3, room, oversubscribe=False)
    with pytest.raises(StartError, match=r"4 engines need 400 MiB of memory.*\(100 MiB each\), but 399 MiB are free"):
        check_capacity(4, room, oversubscribe=False)
    check_capacity(4, room, oversubscribe=True)


def test_a_limit_of_the_administrator_applies_to_all_users(
    no_administrator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert this_machine().most_engines is None
    no_administrator.write_text("3\n")
    assert this_machine().most_engines == 3
    monkeypatch.setenv(CAP_VARIABLE, "7")  # of the user's own
    assert this_machine().most_engines == 3
    monkeypatch.setenv(CAP_VARIABLE, "2")
    with pytest.raises(StartError, match=rf"4 engines were asked for, but {CAP_VARIABLE} allows 2"):
        check_capacity(4, this_machine(), oversubscribe=True)


@pytest.mark.parametrize("text", ["", "many", "0", "-1", "2.5"])
def test_a_limit_that_is_not_a_number_is_a_clear_error(no_administrator: Path, text: str) -> None:
    no_administrator.write_text(text)
    with pytest.raises(StartError, match="is not a valid limit"):
        this_machine()


def test_no_engine_starts_if_too_many_are_requested(no_administrator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "cores", lambda: 2)
    with pytest.raises(StartError, match="200 engines were asked for on a machine with 2 cores"):
        distnb.start(200, [f"cpu:{index}" for index in range(200)])
    no_administrator.write_text("1")
    with pytest.raises(StartError, match=r"max_engines allows 1 on this machine"):
        distnb.start(2, oversubscribe=True)


def test_the_memory_of_this_machine_is_known() -> None:
    assert 0 < this_machine().memory_nbytes < 2**60
    assert this_machine().cores >= 1

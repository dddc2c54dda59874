"""The panel's messages without a kernel, and the socket for a second terminal without a cluster."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distnb.cluster.local import terminal_socket
from distnb.cluster.local.terminal_socket import TerminalSocket, ask, running
from distnb.errors import NoClusterError
from distnb.notebook.engines import EngineStatus
from distnb.views.chart_model import COLORS
from distnb.views.live_model import LiveModel
from distnb.widgets.panel.side_panel import SidePanel
from distnb.widgets.panel.snapshot import mark_of, snapshot
from distnb.wire.messages import ProgramEnded
from tests.support.live_events import draw, sample, started


def session(*states: str, hosts: tuple[str, str] = ("here", "here")) -> Any:
    rows = tuple(
        EngineStatus(engine=i, device=f"cpu:{i}", pid=0, host=hosts[i], state=state) for i, state in enumerate(states)
    )
    return SimpleNamespace(status=lambda: rows)


def kinds(state: dict[str, Any]) -> list[tuple[str, str]]:
    return [(engine["kind"], engine["state"]) for engine in state["engines"]]


def test_states_of_engines_follow_replicas_and_processes() -> None:
    model, idle = started(), session("idle", "idle")
    assert snapshot(None, None, {}, 0.0) == {"engines": None, "running": False, "head": None, "lines": [], "curves": []}
    assert kinds(snapshot(idle, None, {}, 0.0)) == [("idle", "idle")] * 2
    assert kinds(snapshot(idle, model, {}, 0.0)) == [("running", "running")] * 2
    model.feed(ProgramEnded(engine=1, program=1, status="error", summary="ValueError", where="cell 1, line 3"), 1.0)
    state = snapshot(session("busy with program 1, which was ended", "idle"), model, {}, 1.0)
    assert kinds(state) == [("busy", "busy"), ("error", "failed")]
    assert [engine["at"] for engine in state["engines"]] == ["busy with program 1, which was ended", "cell 1, line 3"]
    died = snapshot(session("idle", "was killed by SIGKILL"), model, {}, 1.0)["engines"][1]
    assert (died["kind"], died["state"], died["at"]) == ("error", "died", "was killed by SIGKILL")
    model.end(2.0, failed=True)
    assert mark_of(model) == {
        "title": "mirrored",
        "state": "failed",
        "replicas": ["0 on cpu:0: ended", "1 on cpu:1: failed"],
        "distributed": False,
    }
    assert mark_of(LiveModel()) is None, "an ordinary cell has none"


def test_a_stopping_cluster_is_not_listed() -> None:
    def status() -> Any:
        raise NoClusterError("stopped")

    assert snapshot(SimpleNamespace(status=status), started(), {}, 0.0)["engines"] is None  # type: ignore[arg-type]


def test_machines_are_named_if_there_are_several() -> None:
    known = {1: sample(1, 0.0, rss_nbytes=5, device_nbytes=7, host_nbytes=9)}
    state = snapshot(session("idle", "idle", hosts=("a", "b")), None, known, 0.0)
    assert [engine["place"] for engine in state["engines"]] == ["cpu:0 of a", "cpu:1 of b"]
    assert [engine["memory"] for engine in state["engines"]] == [
        [],
        [{"name": "memory", "used": 5, "total": 9}, {"name": "on device", "used": 7, "total": None}],
    ]


def test_curves_are_thinned_to_their_latest_point_and_are_json() -> None:
    model = started()
    for step in range(1, 501):
        value = math.nan if step == 500 else float(step)
        draw(model, (step, 0, {"loss": value}))
    state = json.loads(json.dumps(snapshot(None, model, {}, 0.0), allow_nan=False))
    (line,) = state["curves"][0]["lines"]
    assert len(line["points"]) <= 60
    assert line["points"][-1] == [500, None]
    assert line["last"] == "nan"


def test_an_order_always_gets_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, Any]] = []
    send = lambda stream, kind, content, **more: sent.append((kind, content))  # noqa: E731
    panel = SidePanel(SimpleNamespace(session=SimpleNamespace(send=send)), SimpleNamespace(busy=False))  # type: ignore[arg-type]

    def fail() -> str:
        raise OSError(9, "Bad file descriptor")  # the cluster ends meanwhile

    monkeypatch.setattr(panel, "_stacks", fail)

    async def take() -> None:
        panel._handle_request(None, [], {"content": {"action": "stacks"}})

    asyncio.run(take())
    assert sent == [("distnb_reply", {"error": "[Errno 9] Bad file descriptor"})]


# -- the socket ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a cluster's private directory in a separate place."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # short: a socket's path has little room
        monkeypatch.setattr(terminal_socket, "places", lambda: [place])
        made = Path(place, "distnb-0123")
        made.mkdir(mode=0o700)
        yield made


def test_a_socket_answers_until_it_is_closed(directory: Path) -> None:
    def fail() -> str:
        raise NoClusterError("It was stopped.")

    served = TerminalSocket(directory, {"stacks": lambda: "é" * 100_000, "process": fail})
    (path,) = running()
    assert path.stat().st_mode & 0o777 == 0o600
    assert ask(path, "stacks") == "é" * 100_000
    assert ask(path, "process") == "It was stopped.\n"
    assert ask(path, "else") == "There is no answer to 'else'.\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(path))  # and is removed
    assert ask(path, "else")
    served.close()
    assert ask(path, "stacks") is None
    for thread in [each for each in threading.enumerate() if each.name == "distnb-terminal"]:
        thread.join(10)
        assert not thread.is_alive()


def test_a_cluster_that_ends_during_the_search_is_skipped(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = TerminalSocket(directory, {})
    (path,) = running()
    served.close()
    is_private = terminal_socket._is_private

    def ends(found: Path) -> bool:
        path.unlink()
        return is_private(found)

    monkeypatch.setattr(terminal_socket, "_is_private", ends)
    assert running() == []


def test_a_socket_outlives_a_lack_of_descriptors(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")]

    class Short(socket.socket):
        def accept(self) -> Any:
            if failures:
                raise failures.pop()
            return super().accept()

    monkeypatch.setattr(terminal_socket.socket, "socket", Short)
    served = TerminalSocket(directory, {"stacks": lambda: "there"})
    (path,) = running()
    assert ask(path, "stacks") == "there"
    served.close()


def test_sockets_of_other_users_are_ignored(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TerminalSocket(directory, {"stacks": lambda: "secret"})
    (path,) = running()
    monkeypatch.setattr(terminal_socket, "_user", lambda connected: os.getuid() + 1)
    assert ask(path, "stacks") is None
    stranger = lambda connected: os.getuid() + (threading.current_thread().name == "distnb-terminal")  # noqa: E731
    monkeypatch.setattr(terminal_socket, "_user", stranger)
    assert not ask(path, "stacks")
    directory.chmod(0o755)
    assert running() == []


def test_a_replica_has_the_same_colour_as_in_the_live_view() -> None:
    drawn = (Path(__file__).parents[3] / "extension/src/dom.ts").read_text(encoding="utf-8")
    (colors,) = re.findall(r"COLORS = \[(.*)\];", drawn)
    assert tuple(re.findall("#[0-9a-f]{6}", colors)) == COLORS

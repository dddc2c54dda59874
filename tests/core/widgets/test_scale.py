"""A session with 64 replicas, whose engines are simulated, and the fidelity of the simulation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import distnb
from benchmarks.simulated_engines.launcher import replacing_engines
from distnb.activity import sample_period_s
from distnb.errors import RemoteError
from distnb.notebook.programs.outcome import Outcome
from distnb.notebook.session import Session
from distnb.widgets.cell_view import CellView
from distnb.widgets.live_views import PictureView
from distnb.wire.described_values import Described, PlainValue, Result, as_object
from distnb.wire.messages import ProgramEnded, Reply, TelemetrySample
from tests.support.live_events import Recorded
from tests.support.processes import wait_until
from tests.support.sessions import run_cell, started

pytestmark = pytest.mark.processes

N = 64


# -- the simulation ------------------------------------------------------------------------------------------------------

CELLS = (
    "pass",
    "a = 1; b = 2.5; c = 'text'; d = (1, 2)",
    "rows = [0.5, 0.25]; table = {'a': [1, 2]}; print('a line')",
    "rows.append(1)",
    "loss = Tensor(0.25)",
    "del a",
)


def _of_notebook(session: Session, definition: str) -> Callable[..., Any]:
    """Define a function in the notebook's namespace, so that it is sent by value: replicas do not have this module."""
    exec(definition, session.user_ns)
    function: Callable[..., Any] = session.user_ns[definition.partition("(")[0].removeprefix("def ")]
    return function


def _facts(described: Described) -> tuple[Any, ...]:
    kept = as_object(described)
    if kept is None:
        return type(described), described if isinstance(described, PlainValue) else None
    summary = kept.summary
    seen = summary.type, summary.shape, summary.number
    return type(described), kept.identity, kept.digest is not None, seen


def _effects(reply: Reply) -> tuple[Any, ...]:
    result = reply.value
    assert isinstance(result, Result)
    packed = None if result.pack is None else (result.pack.serial, result.pack.names, bool(result.pack.data))
    plain = None if result.plain is None else result.plain.names
    names = {name: _facts(described) for name, described in result.names.items()}
    returned = None if result.result is None else _facts(result.result.described)
    return reply.status, names, result.deleted, sorted(result.changed), packed, plain, returned


def _replies_and_events(
    monkeypatch: pytest.MonkeyPatch, tensor: str
) -> tuple[list[tuple[int, Any]], list[tuple[int, str]]]:
    """Return the effects of `CELLS` and of a call on each of two engines, and the kinds of the cells' last events."""
    replies: list[tuple[int, Any]] = []
    ends: list[tuple[int, str]] = []
    latest: dict[int, Any] = {}
    receive = Outcome.receive

    def record(outcome: Outcome, engine: int, reply: Reply) -> None:
        replies.append((engine, _effects(reply)))
        receive(outcome, engine, reply)

    def note(event: Any) -> None:
        if isinstance(event, ProgramEnded):
            ends.append((event.engine, type(latest.get(event.engine)).__name__))
        if hasattr(event, "engine"):
            latest[event.engine] = event

    with started(2) as session, monkeypatch.context() as patched:
        patched.setattr(Outcome, "receive", record)
        unsubscribe = session.events.subscribe(note)
        for number, cell in enumerate(CELLS):
            run_cell(session, cell.replace("Tensor", tensor), f"<cell {number}>")
        answer = _of_notebook(session, "def answer(): return 42")
        assert distnb.MirroredStrategy().run(answer) == 42
        unsubscribe()
    return sorted(replies, key=lambda reply: reply[0]), sorted(ends)


def test_simulated_engines_reply_as_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _replies_and_events(monkeypatch, "torch.tensor")
    with replacing_engines(remote=False):
        simulated = _replies_and_events(monkeypatch, "Tensor")
    assert simulated == real
    assert len(real[0]) == 2 * (len(CELLS) + 1)


# -- a large session ------------------------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.features)],
    ids=["this machine", "other machines"],
)
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    with replacing_engines(remote=request.param), started(N) as found:
        yield found


def test_values_of_a_cell_are_bound(session: Session) -> None:
    run_cell(session, "count = 3; rows = [0.5, {'a': 1}]; mine = replica; loss = Tensor(0.25)", "<cell 1>")
    names = session.user_ns
    assert (names["count"], names["rows"]) == (3, [0.5, {"a": 1}])
    assert distnb.MirroredStrategy().local_results(names["mine"]) == tuple(range(N))
    assert isinstance(names["loss"], distnb.Mirrored)
    assert names["loss"].item() == 0.25


def test_an_object_that_all_replicas_change_alike_is_updated_in_place(session: Session) -> None:
    config = session.user_ns["config"] = {"rate": 0.1, "layers": [1, 2]}
    run_cell(session, "config['rate'] = config['rate'] * 2; config['layers'].append(3)", "<cell 2>")
    assert session.user_ns["config"] is config
    assert config == {"rate": 0.2, "layers": [1, 2, 3]}
    run_cell(session, "config['rate'] = replica", "<cell 3>")
    assert isinstance(session.user_ns.pop("config"), distnb.PerReplica)


def test_calls_return_the_results_of_all_replicas(session: Session) -> None:
    strategy = distnb.MirroredStrategy()
    own_step = _of_notebook(
        session, "def own_step(scale): return {'half': 0.5 * scale, 'own': replica, 'loss': Tensor(float(replica))}"
    )
    for scale in (1.0, 3.0):
        result = strategy.run(own_step, args=(scale,))
        assert result["half"] == 0.5 * scale
        assert strategy.local_results(result["own"]) == tuple(range(N))
        assert strategy.reduce("sum", result["loss"], axis=None).item() == sum(range(N))


def test_output_and_telemetry_of_all_replicas_are_shown(session: Session) -> None:
    events: list[Any] = []
    unsubscribe = session.events.subscribe(events.append)
    try:
        run_cell(
            session,
            "print('all')\nfor i in range(10):\n    await step(0.05)\n    live(loss=replica)\nprint('of', replica)",
            "<cell 4>",
        )
        wait_until(lambda: getattr(events[-1], "state", "") == "ended", 10)
    finally:
        unsubscribe()
    shown = Recorded()
    view = CellView(shown, PictureView, N)
    for event in events:
        view.feed(event, 0.0)
    view.finish(1.0, failed=False)
    lines = shown.text.splitlines()
    assert lines[0] == f"[0-{N - 1}] all"
    assert sorted(lines[1:]) == sorted(f"[{replica}] of {replica}" for replica in range(N))
    assert {row.steps for row in view.model.rows.values()} == {10}
    assert {row.values["loss"] for row in view.model.rows.values()} == set(range(N))
    spent = view.model.timeline.spent()
    assert spent is not None
    assert len(spent.seconds) == N
    for replica in range(N):
        times = [event.seconds for event in events if isinstance(event, TelemetrySample) and event.replica == replica]
        gaps = [after - before for before, after in itertools.pairwise(times[:-1])]  # the end of the cell has a sample
        assert all(gap >= 0.9 * sample_period_s(N) for gap in gaps)


def test_events_are_requested_only_after_calls(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the end of a notebook's cell costs no message if all engines have reported the distributed cell's."""
    asked: list[Any] = []
    await_flush = session.engines.supervisor.await_flush
    monkeypatch.setattr(
        session.engines.supervisor, "await_flush", lambda *args: [asked.append(args), await_flush(*args)][1]
    )
    run_cell(session, "pass", "<cell 5>")
    assert session.flush_events()
    assert asked == []
    distnb.MirroredStrategy().run(_of_notebook(session, "def answer(): return 42"))
    assert session.flush_events()
    assert len(asked) == 1


def test_one_failure_ends_the_cell_on_all_replicas(session: Session) -> None:
    with pytest.raises(RemoteError, match="no luck"):
        run_cell(session, "if replica == 40: raise ValueError('no luck')\nawait sleep(600)", "<cell 6>")
    assert session.stuck == ()
    assert len(session.stacks()) == len(session.memory()) == N
    run_cell(session, "after = 'failure'", "<cell 7>")
    assert session.user_ns["after"] == "failure"

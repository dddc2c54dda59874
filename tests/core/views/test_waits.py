"""The sentences about who waits for whom, from synthetic samples."""

from __future__ import annotations

from typing import Any

import pytest

from distnb.views.waits_model import WaitsModel
from distnb.widgets.cell_view import CellView
from distnb.widgets.content import live_html, picture_bundle
from distnb.widgets.live_views import PictureView
from distnb.wire.messages import InputFinished, InputRequest, ProgramEnded, Status, TelemetrySample, Waiting
from tests.support import live_events
from tests.support.live_events import Recorded, started, team_of

REDUCE = "distnb's all_reduce(float32[10], sum)"


def sample(replica: int, at: float, **more: Any) -> TelemetrySample:
    return live_events.sample(replica, at, **{"where": "cell 3, line 3", **more})


def waits(seconds: float, kind: Any = "collective", number: int = 17, what: str = REDUCE, group: str = "w") -> Waiting:
    where = "Cell In[3], line 4" if kind == "collective" else ""
    return Waiting(kind=kind, what=what, where=where, group=group, number=number, seconds=seconds)


def reports(*samples: TelemetrySample, at: float = 6.0, who: str = "replica") -> list[str]:
    model = WaitsModel(who)
    for each in samples:
        model.feed(each, each.seconds)
    return model.lines(at)


def test_waiting_and_missing_replicas_are_named_with_their_collective() -> None:
    sleeping = [sample(0, moment, call="time.sleep") for moment in (0.0, 3.0, 6.0)]
    assert reports(*sleeping, sample(1, 6.0, waiting=waits(6.0))) == [
        "replica 1 has waited in all_reduce (cell 3, line 4; number 17) for 6 s; "
        "replica 0 has not arrived: it has been in cell 3, line 3, in time.sleep, for 6 s."
    ]


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        ([sample(0, 6.0), sample(1, 6.0, waiting=waits(2.9))], {}),  # a short wait
        ([sample(0, 6.0), sample(1, 6.0)], {}),
        ([sample(0, 0.0, waiting=waits(2.0))], {"at": 30.0}),  # an outdated sample
    ],
)
def test_other_replicas_are_not_reported(samples: list[TelemetrySample], options: dict[str, Any]) -> None:
    assert reports(*samples, **options) == []


@pytest.mark.parametrize(
    ("samples", "line"),
    [
        (
            [*(sample(each, 6.0, waiting=waits(5.0 + each / 2)) for each in (0, 1, 3)), sample(2, 6.0)],
            "replicas 0-1, 3 have waited in all_reduce (cell 3, line 4; number 17) for 6 s; replica 2 has not arrived",
        ),
        (
            [sample(replica, 6.0, waiting=waits(4.0)) for replica in (0, 1)],
            "replicas 0-1 have waited in all_reduce (cell 3, line 4; number 17) for 4 s; all have arrived.",
        ),
        (  # a blocked interpreter
            [sample(0, 1.0), sample(1, 6.0, waiting=waits(5.0))],
            "replica 1 has waited in all_reduce (cell 3, line 4; number 17) for 5 s; "
            "replica 0 has not arrived, and has reported nothing for 5 s; it was last seen in cell 3, line 3.",
        ),
        (
            [sample(0, 6.0), sample(1, 6.0, waiting=waits(4.0, "background"))],
            "replica 1 has had all_reduce (cell 3, line 3; number 17) under way for 4 s; replica 0",
        ),
    ],
)
def test_a_sentence_combines_replicas_and_names_those_that_are_missing(
    samples: list[TelemetrySample], line: str
) -> None:
    (found,) = reports(*samples)
    assert found.startswith(line)


def test_a_worker_that_waits_for_a_parameter_server_is_named() -> None:
    asking = sample(1, 6.0, waiting=waits(3.2, "servers", 0, "parameter server 0", ""))
    assert reports(asking, who="worker") == ["worker 1 has waited for parameter server 0 (cell 3, line 3) for 3 s."]


def test_a_replica_that_waits_for_input_is_named() -> None:
    reading = sample(0, 6.0, waiting=waits(4.0, "input", 0, "", ""))
    lines = reports(reading, sample(1, 6.0, waiting=waits(4.0)))
    assert lines == [
        "replica 0 has waited for its next batch (cell 3, line 3) for 4 s.",
        "replica 1 has waited in all_reduce (cell 3, line 4; number 17) for 4 s; "
        "replica 0 has not arrived: it has waited for its next batch (cell 3, line 3) for 4 s.",
    ]


def test_replicas_in_different_collectives_are_named() -> None:
    (first, second) = reports(
        sample(0, 6.0, waiting=waits(4.0, number=17)),
        sample(1, 6.0, waiting=waits(4.0, number=3, what="barrier()", group="part")),
    )
    assert "replica 1 has not arrived: it has waited in barrier (cell 3, line 4; number 3) for 4 s" in first
    assert "replica 0 has not arrived: it has waited in all_reduce" in second


def test_the_view_shows_waits_only_while_the_cell_runs() -> None:
    model = started()
    model.feed(sample(0, 6.0), 6.0)
    model.feed(sample(1, 6.0, waiting=waits(6.0)), 6.0)
    for shown in (
        "".join(live_html(model, 6.0)),
        picture_bundle(model, 6.0)["text/html"],
        picture_bundle(model, 6.0)["text/plain"],
    ):
        assert "replica 1 has waited in all_reduce (cell 3, line 4; number 17) for 6 s" in shown
    model.feed(InputRequest(engine=0, program=1, replica=0, text="", prompt="> "), 6.0)
    assert model.waits.lines(6.0)[0].endswith("replica 0 has not arrived: it asks you for a line, in cell 3, line 3.")
    model.feed(InputFinished(0, 1, 0), 6.0)
    assert "asks" not in model.waits.lines(6.0)[0]
    model.feed(ProgramEnded(engine=1, program=1, status="ok"), 6.5)
    assert model.waits.lines(6.5) == []


def test_the_last_waits_of_an_ended_program_remain_in_the_picture() -> None:
    model = started()
    model.feed(sample(0, 6.0), 6.0)
    model.feed(sample(1, 6.0, waiting=waits(6.0)), 6.0)
    for engine in (1, 0):
        model.feed(sample(engine, 6.4, where=""), 6.4)  # it leaves the block, and ends
    for engine in (1, 0):
        model.feed(ProgramEnded(engine=1, program=engine, status="interrupted"), 6.5)
    model.feed(Status(program=1, state="ended", team=team_of(2), text="KeyboardInterrupt"), 6.5)
    model.end(6.5, failed=True)
    kept = picture_bundle(model, 60.0)
    for shown in (kept["text/html"], kept["text/plain"]):
        assert (
            shown.count("When it ended: replica 1 has waited in all_reduce (cell 3, line 4; number 17) for 6 s;") == 1
        )
        assert "replica 0 has not arrived: it has been in cell 3, line 3" in shown
    model.feed(Status(program=2, state="started", team=team_of(2)), 61.0)
    assert "When it ended" not in picture_bundle(model, 61.0)["text/plain"]


def test_an_ordinary_cell_with_a_hanging_call_shows_a_view_of_the_wait() -> None:
    """Check a program that was not announced, draws nothing, and has finished no step."""
    cell = Recorded()
    view = CellView(cell, PictureView, replicas=2)
    for moment in (0.0, 1.0, 2.0):
        view.feed(sample(0, moment, call="time.sleep"), moment)
        view.feed(sample(1, moment, waiting=waits(moment)), moment)
        view.tick(moment)
    assert cell.shown == [], "this is not reported"
    view.feed(sample(0, 3.5, call="time.sleep"), 3.5)
    view.feed(sample(1, 3.5, waiting=waits(3.5)), 3.5)
    view.tick(3.5)
    assert (
        "replica 1 has waited in all_reduce (cell 3, line 4; number 17) for 4 s; replica 0 has not arrived"
        in cell.shown[-1]["text/plain"]
    )

"""The sentences about who waits for whom, from synthetic samples."""

from __future__ import annotations

from typing import Any

from distnb.topology import Device, Team
from distnb.views.live_model import LiveModel
from distnb.views.waits_model import WaitsModel
from distnb.widgets.cell_view import CellView
from distnb.widgets.content import live_html, picture_bundle
from distnb.widgets.live_views import PictureView
from distnb.widgets.publisher import Publisher
from distnb.wire.messages import InputFinished, InputRequest, ProgramEnded, Status, TelemetrySample, Waiting

REDUCE = "group.all_reduce(float32[10], sum)"


def sample(replica: int, at: float, **more: Any) -> TelemetrySample:
    known = {"where": "cell 3, line 3", **more}
    return TelemetrySample(
        engine=replica, program=1, replica=replica, seconds=at, steps=0, examples=0, rss_nbytes=10, **known
    )


def waits(seconds: float, kind: Any = "collective", number: int = 17, what: str = REDUCE, group: str = "w") -> Waiting:
    return Waiting(
        kind=kind,
        what=what,
        where="Cell In[3], line 4" if kind == "collective" else "",
        group=group,
        number=number,
        seconds=seconds,
    )


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


def test_a_short_wait_is_not_reported() -> None:
    assert reports(sample(0, 6.0), sample(1, 6.0, waiting=waits(2.9))) == []
    assert reports(sample(0, 6.0), sample(1, 6.0)) == []


def test_several_waiting_replicas_are_combined() -> None:
    several = [sample(replica, 6.0, waiting=waits(5.0 + replica / 2)) for replica in (0, 1, 3)]
    (line,) = reports(*several, sample(2, 6.0))
    assert line.startswith(
        "replicas 0-1, 3 have waited in all_reduce (cell 3, line 4; number 17) for 6 s; replica 2 has not"
    )


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


def test_all_replicas_may_be_in_the_collective() -> None:
    (line,) = reports(*[sample(replica, 6.0, waiting=waits(4.0)) for replica in (0, 1)])
    assert line == "replicas 0-1 have waited in all_reduce (cell 3, line 4; number 17) for 4 s; all have arrived."


def test_a_replica_with_a_blocked_interpreter_is_reported_as_silent() -> None:
    (line,) = reports(sample(0, 1.0), sample(1, 6.0, waiting=waits(5.0)))
    assert line.endswith(
        "replica 0 has not arrived, and has reported nothing for 5 s; it was last seen in cell 3, line 3."
    )


def test_outdated_samples_are_not_reported() -> None:
    assert reports(sample(0, 0.0, waiting=waits(2.0)), at=30.0) == []


def test_a_worker_that_waits_for_a_parameter_server_is_named() -> None:
    asking = sample(1, 6.0, waiting=waits(3.2, "servers", 0, "parameter server 0", ""))
    assert reports(asking, who="worker") == ["worker 1 has waited for parameter server 0 (cell 3, line 3) for 3 s."]


def test_background_operations_are_not_reported_as_waits() -> None:
    (line,) = reports(sample(0, 6.0), sample(1, 6.0, waiting=waits(4.0, "background")))
    assert line.startswith("replica 1 has had all_reduce (cell 3, line 3; number 17) under way for 4 s; replica 0")


def test_the_view_shows_waits_only_while_the_cell_runs() -> None:
    model = LiveModel("mirrored")
    team = Team(engines=(0, 1), devices=(Device("cpu", 0), Device("cpu", 1)), generation=1, store_host="", store_port=0)
    model.feed(Status(program=1, state="started", team=team), 0.0)
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
    model = LiveModel("mirrored")
    team = Team(engines=(0, 1), devices=(Device("cpu", 0), Device("cpu", 1)), generation=1, store_host="", store_port=0)
    model.feed(Status(program=1, state="started", team=team), 0.0)
    model.feed(sample(0, 6.0), 6.0)
    model.feed(sample(1, 6.0, waiting=waits(6.0)), 6.0)
    for engine in (1, 0):
        model.feed(sample(engine, 6.4, where=""), 6.4)  # it leaves the block, and ends
    for engine in (1, 0):
        model.feed(ProgramEnded(engine=1, program=engine, status="interrupted"), 6.5)
    model.feed(Status(program=1, state="ended", team=team, text="KeyboardInterrupt"), 6.5)
    model.end(6.5, failed=True)
    kept = picture_bundle(model, 60.0)
    for shown in (kept["text/html"], kept["text/plain"]):
        assert (
            shown.count("When it ended: replica 1 has waited in all_reduce (cell 3, line 4; number 17) for 6 s;") == 1
        )
        assert "replica 0 has not arrived: it has been in cell 3, line 3" in shown
    model.feed(Status(program=2, state="started", team=team), 61.0)
    assert "When it ended" not in picture_bundle(model, 61.0)["text/plain"]


class _Shown(Publisher):
    """A record of the plain texts of displays."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, stream: str, text: str) -> None:
        pass

    def display(self, name: str, data: Any, metadata: Any, *, update: bool = False) -> None:
        self.texts.append(data["text/plain"])

    def area(self, lines: tuple[str, ...]) -> None:
        pass

    def clear(self, wait: bool) -> None:
        pass


def test_an_ordinary_cell_with_a_hanging_call_shows_a_view_of_the_wait() -> None:
    """Check a program that was not announced, draws nothing, and has finished no step."""
    shown = _Shown()
    view = CellView(shown, PictureView, replicas=2)
    for moment in (0.0, 1.0, 2.0):
        view.feed(sample(0, moment, call="time.sleep"), moment)
        view.feed(sample(1, moment, waiting=waits(moment)), moment)
        view.tick(moment)
    assert shown.texts == [], "this is not reported"
    view.feed(sample(0, 3.5, call="time.sleep"), 3.5)
    view.feed(sample(1, 3.5, waiting=waits(3.5)), 3.5)
    view.tick(3.5)
    assert (
        "replica 1 has waited in all_reduce (cell 3, line 4; number 17) for 4 s; replica 0 has not arrived"
        in shown.texts[-1]
    )

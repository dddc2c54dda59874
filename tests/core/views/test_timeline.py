"""The replicas' time, from synthetic events: shares, stragglers, clocks of several machines, pictures, traces."""

from __future__ import annotations

import json
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from distnb import activity
from distnb.activity import Arrival, Event
from distnb.engine.output.telemetry import Telemetry, remember_cell
from distnb.views.live_model import LiveModel
from distnb.views.timeline_model import KINDS, Spent, TimelineModel, sentence
from distnb.widgets.content import live_html, picture_bundle, plain_summary
from distnb.widgets.timeline import Timeline
from distnb.widgets.timeline_picture import gantt_picture, shares_picture, timeline_html
from distnb.wire.messages import TelemetrySample
from tests.support import live_events

STEP_S = 0.040


def trained(
    own_s: list[float], steps: int = 12, *, input_s: float = 0.0, ahead_s: float = 0.0, serial: int = 1
) -> list[tuple[Event, ...]]:
    """Return events of replicas that compute this long in each step, and then meet in a collective of 2 ms.

    The clock of all but the first is `ahead_s` ahead.
    """
    found = []
    for replica, own in enumerate(own_s):
        events, offset = [], ahead_s if replica else 0.0
        for step in range(steps):
            begin = 100.0 + step * (max(own_s) + 0.002) + offset
            met, end = begin + own, begin + max(own_s) + 0.002
            arrival = Arrival(
                at=met,
                group="1/world",
                number=step + 1,
                what="distnb's all_reduce(float32[10], sum)",
                where="Cell In[3], line 4",
            )
            events += [("input", begin, begin + input_s, Arrival(at=begin))] if input_s else []
            events += [
                ("collective", met, end, arrival),
                ("step", end, end, Arrival(at=end, number=step + 1)),
            ]
        numbered = [Event(serial + place, *event[:3], *event[3]) for place, event in enumerate(events)]  # type: ignore[arg-type]
        now = numbered[-1].end
        found.append((*numbered, Event(serial=0, kind="program", begin=100.0 + offset - 0.01, end=now, at=0.0)))
    return found


def sample(replica: int, events: tuple[Event, ...], **more: Any) -> TelemetrySample:
    known = {"machine": "a", "processors": 2, **more}
    return live_events.sample(replica, events[-1].end - 100.0, steps=12, events=events, **known)


def model_of(events: list[tuple[Event, ...]], **more: Any) -> TimelineModel:
    model = TimelineModel()
    for replica, own in enumerate(events):
        model.feed(sample(replica, own, **more))
    return model


def spent_of(model: TimelineModel, steps: int = 10) -> Spent:
    spent = model.spent(steps)
    assert spent is not None
    return spent


def shares(model: TimelineModel, replica: int) -> dict[str, float]:
    spent = spent_of(model)
    return {kind: round(spent.seconds[replica][kind] / (spent.end - spent.begin), 3) for kind in KINDS}


# -- the model -------------------------------------------------------------------------------------------------------


def test_a_sleeping_replica_is_the_straggler() -> None:
    model = model_of(trained([0.010, 0.038]))
    assert shares(model, 0) == pytest.approx(
        {"compute": 0.25, "waiting": 0.7, "communication": 0.05, "input": 0, "idle": 0}
    )
    assert shares(model, 1) == pytest.approx(
        {"compute": 0.95, "waiting": 0, "communication": 0.05, "input": 0, "idle": 0}
    )
    spent = spent_of(model)
    assert (spent.steps, spent.step_s) == (10, pytest.approx(STEP_S))
    assert sentence(spent) == (
        "A step takes 40 ms: 60% compute, 35% waiting for others, 5% communication. Replica 1 is the straggler: "
        "replica 0 waits 28 ms a step for it, since it computes 28 ms longer."
    )


def test_the_straggler_of_several_replicas_is_named_and_equal_ones_have_none() -> None:
    several = sentence(spent_of(model_of(trained([0.010, 0.010, 0.038, 0.010]))))
    assert "Replica 2 is the straggler: the others wait 28 ms a step for it, since" in several
    equal = spent_of(model_of(trained([0.010, 0.010, 0.010])))
    assert equal.straggler is None
    assert sentence(equal) == "A step takes 12 ms: 83% compute, 17% communication."


def test_replicas_that_wait_in_turn_have_no_straggler() -> None:
    events = []
    for replica in (0, 1):
        own: list[tuple[Any, ...]] = []
        for step in range(12):
            begin = 10.0 + step * 0.04
            met = begin + (0.038 if step % 2 == replica else 0.01)
            own.append(("collective", met, begin + 0.04, Arrival(at=met, group="w", number=step + 1)))
            own.append(("step", begin + 0.04, begin + 0.04, Arrival(at=0.0, number=step + 1)))
        numbered = tuple(Event(place + 1, *event[:3], *event[3]) for place, event in enumerate(own))
        events.append((*numbered, Event(serial=0, kind="program", begin=10.0, end=own[-1][2], at=0.0)))
    spent = spent_of(model_of(events))
    assert spent.straggler is None
    assert "no replica is the straggler" in sentence(spent)


def test_input_is_distinguished_and_may_make_a_straggler() -> None:
    quick, slow = trained([0.010, 0.040], input_s=0.0)[0], trained([0.010, 0.040], input_s=0.030)[1]
    model = model_of([quick, slow])
    assert shares(model, 1)["input"] == pytest.approx(0.030 / 0.042, abs=0.001)
    spent = spent_of(model)
    assert "since its input takes 30 ms longer" in sentence(spent)


def test_a_collective_within_a_read_counts_as_a_collective() -> None:
    events = (
        Event(serial=1, kind="step", begin=0.0, end=0.0, at=0.0, number=1),
        Event(serial=2, kind="collective", begin=0.02, end=0.05, at=0.02, group="w", number=1),
        Event(serial=3, kind="input", begin=0.01, end=0.06, at=0.01),
        Event(serial=4, kind="step", begin=0.1, end=0.1, at=0.1, number=2),
        Event(serial=0, kind="program", begin=-1.0, end=0.1, at=0.0),
    )
    model = model_of([events])
    spent = spent_of(model)
    assert spent.seconds[0] == pytest.approx(
        {"compute": 0.05, "communication": 0.03, "waiting": 0.0, "input": 0.02, "idle": 0.0}
    )


def test_the_time_between_programs_is_idle() -> None:
    events = tuple(
        Event(place + 1, *event[:3], *event[3])
        for place, event in enumerate(
            (kind, 0.1 * call + begin, 0.1 * call + 0.03, Arrival(at=0.0, number=call + 1))
            for call in range(5)
            for kind, begin in (("step", 0.03), ("program", 0.0))
        )
    )
    assert shares(model_of([events]), 0) == pytest.approx(
        {"compute": 0.3, "communication": 0, "waiting": 0, "input": 0, "idle": 0.7}
    )


def test_clocks_of_two_machines_are_compared_by_the_ends_of_collectives() -> None:
    model = TimelineModel()
    for replica, own in enumerate(trained([0.010, 0.038], ahead_s=5000.0)):
        model.feed(sample(replica, own, machine=f"machine {replica}"))
    assert shares(model, 0)["waiting"] == pytest.approx(0.7, abs=0.001)
    assert shares(model, 1)["waiting"] == pytest.approx(0.0, abs=0.001)


def test_missing_samples_allow_no_conclusion() -> None:
    model = TimelineModel()
    early, late = trained([0.01, 0.01], 12), trained([0.01, 0.01], 24, serial=100)
    for replica in (0, 1):
        model.feed(sample(replica, early[replica]))
    for replica in (0, 1):
        model.feed(sample(replica, late[replica][30:]))  # the samples do not join
    spent = spent_of(model, 1000)
    assert spent.steps == 8


def test_the_display_is_unchanged_if_samples_share_no_step() -> None:
    model = LiveModel()
    assert model.timeline.known(3) is None
    early, late = trained([0.01, 0.01], 12), trained([0.01, 0.01], 48, serial=100)
    for replica in (0, 1):
        model.timeline.feed(sample(replica, early[replica]))
    shown = timeline_html(model)
    assert "<svg" in shown
    model.timeline.feed(sample(0, late[0][40:60]))
    model.timeline.feed(sample(1, late[1][60:]))
    assert model.timeline.spent() is None
    assert timeline_html(model) == shown


def test_steps_of_earlier_cells_are_ignored() -> None:
    model = TimelineModel()
    for replica, own in enumerate(trained([0.01, 0.01])):
        model.feed(sample(replica, own), 9)
    spent = spent_of(model)
    assert spent.steps == 2
    assert [number for _, number in model.pieces()[1]] == [1, 2, 3]


def test_shared_processors_are_reported_only_if_replicas_waited_for_them() -> None:
    sentences = []
    for queued in (0.0, 0.3):
        model = TimelineModel()
        for replica, own in enumerate(trained([0.010] * 4, 30)):
            early = (own[0], Event(serial=0, kind="program", begin=99.0, end=own[0].end, at=0.0))
            model.feed(sample(replica, early, queued_s=1.0))
            rest = (*own[1:-1], own[-1])
            model.feed(sample(replica, rest, queued_s=1.0 + queued * 0.29 * (replica < 2)))
        sentences.append(sentence(spent_of(model)))
    assert "processor" not in sentences[0]
    assert (
        "2 of 4 replicas were ready to compute, but had no processor, for 25% of their time: 4 replicas of a machine "
        "share 2 processors." in sentences[1]
    )


def test_time_without_steps_is_analysed_as_a_whole() -> None:
    kept = [[each for each in own if each.kind != "step"] for own in trained([0.010, 0.038])]
    events = [tuple(each._replace(serial=each.serial and i + 1) for i, each in enumerate(own)) for own in kept]
    spent = spent_of(model_of(events))
    assert spent.steps == 0
    assert sentence(spent).startswith("Of the last 4")


# -- pictures and exports --------------------------------------------------------------------------------------------


def fed(in_detail: bool = False) -> LiveModel:
    model = LiveModel("mirrored")
    model.timeline.in_detail = in_detail
    for replica, own in enumerate(trained([0.010, 0.038])):
        model.feed(sample(replica, own), 1.0)
    return model


@pytest.mark.parametrize("in_detail", [False, True])
def test_the_view_shows_it_in_pictures_and_in_words(in_detail: bool) -> None:
    model = fed(in_detail)
    html = "".join(live_html(model, 1.0))
    assert ('class="queue gantt"' if in_detail else 'class="queue shares"') in html
    assert "Replica 1 is the straggler" in html
    bundle = picture_bundle(model, 1.0)
    assert "Replica 1 is the straggler" in bundle["text/plain"]
    assert bundle["text/html"].count("Replica 1 is the straggler") == 2, "for the picture and for its text"
    assert "data:image/svg+xml" in bundle["text/html"]


def test_nothing_is_shown_before_the_first_step() -> None:
    model = LiveModel("mirrored")
    for replica, own in enumerate(trained([0.010, 0.038], 2)):
        model.feed(sample(replica, own), 1.0)
    assert "A step takes" not in plain_summary(model, 1.0)
    assert "<svg" not in "".join(live_html(model, 1.0))


def test_bars_are_proportional_to_their_times() -> None:
    spent = spent_of(model_of(trained([0.010, 0.038])))
    bars = [each for each in ET.fromstring(shares_picture(spent)).iter() if each.tag.endswith("}rect")]
    wide = {
        (each.get("class"), float(each.get("y", 0))): float(each.get("width", 0)) for each in bars if each.get("class")
    }
    assert wide["waiting", 2.0] / wide["compute", 2.0] == pytest.approx(0.028 / 0.010, abs=0.01)
    assert wide["compute", 21.0] == pytest.approx(418 * 0.95, abs=0.1)


def test_a_gantt_chart_has_each_interval() -> None:
    timeline = Timeline(model_of(trained([0.010, 0.038])), 5)
    root = ET.fromstring(gantt_picture(timeline.rows, []))
    kinds = [each.get("class") for each in root.iter() if each.tag.endswith("}rect") and each.get("class")]
    assert (kinds.count("waiting"), kinds.count("communication"), kinds.count("compute")) == (5, 10, 10)
    assert "all_reduce(float32[10], sum) (cell 3, line 4)" in "".join(root.itertext())


def test_labels_of_close_steps_do_not_overlap() -> None:
    pieces = Timeline(model_of(trained([0.010, 0.038])), 5).rows
    ends = [(0.04, 1), (0.08, 2), (0.081, 3), (0.12, 4)]
    texts = [
        each.text or "" for each in ET.fromstring(gantt_picture(pieces, ends)).iter() if each.tag.endswith("}text")
    ]
    assert [text for text in texts if text.startswith("step")] == ["step 1", "step 2", "step 4"]


def test_a_long_timeline_is_measured_in_seconds() -> None:
    timeline = Timeline(model_of(trained([0.010, 8.0])), 5)
    labels = [
        each.text for each in ET.fromstring(gantt_picture(timeline.rows, [])).iter() if each.tag.endswith("}text")
    ]
    assert "20 s" in labels
    assert "8,000" in repr(timeline)


def test_a_timeline_can_be_rows_a_table_and_a_trace(tmp_path: Path) -> None:
    timeline = Timeline(model_of(trained([0.010, 0.038])), 5)
    assert timeline.rows[0].begin == 0.0
    assert max(each.end for each in timeline.rows) == pytest.approx(5 * STEP_S)
    lines = repr(timeline).splitlines()
    assert lines[1].split() == ["replica", "compute,", "ms", "communication,", "ms", "waiting,", "ms"]
    assert lines[2].split() == ["0", "10", "2", "28"]
    trace = json.loads(timeline.save(tmp_path / "trace.json").read_text())
    spans = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert len(spans) == len(timeline.rows)
    (first, *_) = [each for each in spans if each["cat"] == "waiting"]
    assert (first["pid"], first["dur"], first["args"]["line"]) == (0, pytest.approx(28_000), "cell 3, line 4")
    assert len([each for each in trace["traceEvents"] if each["ph"] == "i"]) == 6


def test_a_missing_measurement_is_reported() -> None:
    timeline = Timeline(TimelineModel(), 5)
    assert repr(timeline) == "Nothing has been measured."
    assert timeline._repr_html_().endswith("Nothing has been measured.</div>")


# -- measuring -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _clean() -> Any:
    yield
    activity.program_began()
    activity.program_ended()


def test_nested_waits_are_separate() -> None:
    activity.begin("input")
    activity.begin("collective", Arrival(at=1.0, group="w", number=7, what="all_reduce()"))
    wait = activity.waiting()
    assert wait is not None
    assert (wait.kind, wait.arrival.number) == ("collective", 7)
    activity.end()
    wait = activity.waiting()
    assert wait is not None
    assert wait.kind == "input"
    activity.end()
    assert activity.waiting() is None
    inner, outer = map(Event._make, activity.latest(2))
    assert (inner.kind, outer.kind) == ("collective", "input")
    assert outer.begin <= inner.begin <= inner.end <= outer.end


def test_a_wait_of_another_thread_is_recorded_separately() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        activity.begin("collective", Arrival(at=0.0, group="w", number=3))
        begun.set()
        go_on.wait(10)
        activity.end()

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(10)
    found = activity.waiting()
    go_on.set()
    thread.join(10)
    assert found is not None
    assert found.arrival.number == 3
    assert activity.waiting() is None


def test_an_end_whose_beginning_was_lost_does_no_harm() -> None:
    activity.begin("input")
    activity.program_began()
    assert activity.waiting() is None
    activity.end()
    assert activity.latest(1)[-1][1] == "program"


def test_samples_contain_each_event_once_and_a_dump_all() -> None:
    telemetry = Telemetry()
    activity.program_began()
    for number in range(100):
        activity.note_step(number)
    first = telemetry.sample(0, 1, 0)
    assert [each[6] for each in first.events[:-1]] == list(range(36, 100))
    assert first.events[-1][1::-1] == ("program", 0)
    assert len(telemetry.sample(0, 1, 0).events) == 1
    assert len(telemetry.sample(0, 1, 0, steps=4096).events) > 100


def test_a_sample_names_the_call_in_the_current_line() -> None:
    source = "import threading\ndef held(begun, go_on):\n    begun.set(); go_on.wait(10)\n"
    import linecache

    linecache.cache["held.py"] = (len(source), None, source.splitlines(keepends=True), "held.py")
    remember_cell("held.py", "Cell In[7]")
    names: dict[str, Any] = {}
    exec(compile(source, "held.py", "exec"), names)
    telemetry, begun, go_on = Telemetry(), threading.Event(), threading.Event()
    samples: list[TelemetrySample] = []

    def look() -> None:
        begun.wait(10)
        for _ in range(200):
            samples.append(telemetry.sample(0, 1, 0))
            if samples[-1].call:
                break
        go_on.set()

    thread = threading.Thread(target=look)
    thread.start()
    names["held"](begun, go_on)
    thread.join(10)
    assert (samples[-1].where, samples[-1].call) == ("cell 7, line 3", "go_on.wait")
    assert samples[0].call == ""

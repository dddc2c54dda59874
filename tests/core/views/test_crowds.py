"""A thousand replicas: views stay small, and the work for each replica does not grow with their number."""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from distnb.activity import Event, of_steps, output_period_s, sample_period_s
from distnb.cluster.local import open_files
from distnb.cluster.local.guardian import _Owned, end_descriptor
from distnb.cluster.local.open_files import FILES_PER_ENGINE, raise_file_limit
from distnb.errors import StartError
from distnb.magics.engine_tables import ready_text, status_rows
from distnb.notebook.engines import EngineStatus
from distnb.notebook.output.output_merger import FIRST_S, HOLD_S, OutputMerger
from distnb.notebook.programs.supervision import Supervision
from distnb.topology import Device, Team
from distnb.views.chart_model import charts
from distnb.views.crowds import MOST_SHOWN, noteworthy, others, unlikeness
from distnb.views.live_model import LiveModel
from distnb.views.timeline_model import TimelineModel
from distnb.views.waits_model import WaitsModel
from distnb.widgets.cell_view import CellView
from distnb.widgets.content import live_html, picture_bundle, replica_table
from distnb.widgets.live_views import PictureView
from distnb.widgets.panel.snapshot import mark_of
from distnb.widgets.timeline_picture import gantt_picture, shares_picture
from distnb.wire.messages import Live, Output, ProgramEnded, Status, TelemetrySample, Waiting
from tests.support.live_events import Recorded, sample, started

STEP_S = 0.1


def team_of(replicas: int) -> Team:
    return Team(
        engines=tuple(range(replicas)),
        devices=tuple(Device("cuda", number % 8) for number in range(replicas)),
        generation=1,
        store_host="10.0.0.1",
        store_port=4000,
        hosts=tuple(f"node-{number // 8}" for number in range(replicas)),
    )


def sample_of(replica: int, steps: int, *, late_s: float = 0.0, waiting: Waiting | None = None) -> TelemetrySample:
    """Return a sample after some steps of 0.1 s, each with a collective that the replica reaches `late_s` later.

    There are 8 replicas on each machine, and the clock of each machine is 1000 s ahead of the one before.
    """
    machine = replica // 8
    events, ahead_s = [], 1000.0 * machine
    for step in range(steps):
        end = ahead_s + STEP_S * (step + 1)
        arrived = end - 0.05 + late_s
        place = "team", step + 1, "distnb's all_reduce(float32[10], sum)", "Cell In[1], line 4"
        events.append((2 * step + 1, "collective", arrived, end, arrived, *place))
        events.append((2 * step + 2, "step", end, end, end, "", step + 1, "", ""))
    program = Event(serial=0, kind="program", begin=ahead_s, end=ahead_s + STEP_S * steps)
    facts: dict[str, Any] = {"where": f"cell 1, line {steps}", "machine": f"machine {machine}", "processors": 8}
    facts |= {"steps": steps, "examples": 32 * steps, "waiting": waiting, "events": (*events, tuple(program))}
    return sample(replica, STEP_S * steps, **facts)


def waits(seconds: float) -> Waiting:
    what = "distnb's all_reduce(float32[10], sum)"
    return Waiting(kind="collective", what=what, where="Cell In[1], line 4", group="team", number=7, seconds=seconds)


def shown_training(replicas: int) -> CellView:
    """Feed a view with the events of a training, and draw it as the front end does."""
    view = CellView(Recorded(), PictureView, replicas)
    now = 0.0
    view.feed(Status(program=1, state="started", team=team_of(replicas)), now)
    for steps in (4, 8, 12):
        for replica in range(replicas):
            now += 0.001
            waiting = waits(0.01) if replica % 2 else None
            view.feed(sample_of(replica, steps, late_s=0.04 * (replica == 1), waiting=waiting), now)
            points = ((steps, 0, {"loss": 1.0 / steps, "own loss": replica / steps}),)
            view.feed(Live(engine=replica, program=1, replica=replica, points=points), now)
            view.feed(_out(replica, f"step {steps}\nstep {steps} of {replica}\n"), now)
        now += 1.0
        view.tick(now)
    for replica in range(replicas):
        view.feed(ProgramEnded(engine=replica, program=1, status="ok"), now)
    view.feed(Status(program=1, state="ended", team=team_of(replicas)), now)
    view.finish(now, failed=False)
    return view


def operations(function: Callable[[], object]) -> int:
    """Count the instructions of Python that a function executes, which does not depend on the machine."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_the_work_of_a_view_grows_in_proportion_to_the_replicas() -> None:
    shown_training(2)  # imports
    few, many = operations(lambda: shown_training(30)), operations(lambda: shown_training(90))
    assert many < 3 * few


def _supervised(engines: int) -> None:
    state = Supervision()
    state._validates = False  # it would look at every engine after every event
    state.began(1, range(engines), 0.0)
    for engine in range(engines):
        state.ended(engine, 1, True, "", 0.0)
        assert state.follows(1) is (engine + 1 < engines)


def _waited(replicas: int) -> None:
    model = WaitsModel()
    for steps in (1, 2):
        for replica in range(replicas):
            model.feed(sample_of(replica, steps, waiting=waits(0.1)), steps + replica / replicas)


def _ended(replicas: int) -> None:
    model, team = LiveModel(), team_of(replicas)
    model.feed(Status(program=1, state="started", team=team), 0.0)
    for engine in team.engines:
        model.feed(ProgramEnded(engine=engine, program=1, status="ok"), 1.0)
        team.rank_of(engine)


@pytest.mark.parametrize("work", [_supervised, _waited, _ended])
def test_the_work_of_a_model_grows_in_proportion_to_the_replicas(work: Callable[[int], None]) -> None:
    work(2)
    assert operations(lambda: work(600)) < 11 * operations(lambda: work(60))


def test_the_story_of_the_supervision_names_some_of_many_engines() -> None:
    state = Supervision()
    state.began(1, range(1000), 0.0)
    assert state.story[-1].after.endswith("15 and 984 more engines]")


# -- views ---------------------------------------------------------------------------------------------------------------


def test_a_view_of_a_thousand_replicas_is_small() -> None:
    view = shown_training(1000)
    for text in (*live_html(view.model, 10.0), *picture_bundle(view.model, 10.0).values()):
        assert len(text) < 60_000
    assert "1000 replicas" in live_html(view.model, 10.0).above


def test_exceptional_replicas_have_rows_in_the_table_of_many() -> None:
    model = started(1000)
    for replica in range(1000):
        model.feed(sample_of(replica, 3 if replica == 700 else 9), 1.0)
    model.feed(ProgramEnded(engine=500, program=1, status="error"), 1.0)
    shown = [int(row[0]) for row in replica_table(model)[1]]
    assert shown == [*range(MOST_SHOWN - 2), 500, 700]
    assert "and 968 other replicas" in live_html(model, 1.0).below
    model = started(MOST_SHOWN)
    assert len(replica_table(model)[1]) == MOST_SHOWN
    assert "other replica" not in live_html(model, 1.0).below


def test_noteworthy_keys_are_those_with_the_highest_scores() -> None:
    assert noteworthy({3: 0.0, 1: 0.0}) == [1, 3]
    assert noteworthy({key: float(key == 99) for key in range(100)}) == [*range(MOST_SHOWN - 1), 99]
    assert unlikeness({0: 1.0, 1: 1.0, 2: 3.0, 3: 2.0, 4: 1.0}) == {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.5, 4: 0.0}
    assert unlikeness({}) == {}
    assert [others(2, total) for total in (2, 3, 1002)] == ["", "and 1 other replica", "and 1,000 other replicas"]


def test_the_mean_of_many_curves_is_that_of_a_sample() -> None:
    model = shown_training(200).model
    equal, own = charts(model)
    assert [series.label for series in equal.series] == ["[0-199]"]
    assert own.series[0].label == "mean of 64 of 200"
    assert len(own.series[0].lines) == 64
    assert list(own.series[0].lines)[:3] == [0, 3, 6]
    assert own.facts.startswith("last 0 to ")


def test_a_mark_of_many_replicas_lists_them_by_state() -> None:
    model = started(100)
    for engine in range(100):
        model.feed(ProgramEnded(engine=engine, program=1, status="error" if engine == 7 else "ok"), 1.0)
    mark = mark_of(model)
    assert mark is not None
    assert mark["replicas"] == ["0-6, 8-99: ended", "7: failed"]


# -- the timeline and waits ----------------------------------------------------------------------------------------------


def test_the_timeline_of_many_machines_finds_the_straggler() -> None:
    model = TimelineModel()
    for replica in range(96):
        model.feed(sample_of(replica, 12, late_s=0.04 * (replica == 70)))
    spent = model.spent()
    assert spent is not None
    assert (spent.steps, len(spent.seconds)) == (10, 96)
    assert spent.straggler is not None
    assert spent.straggler.replica == 70
    assert spent.straggler.held_s / spent.steps == pytest.approx(0.04)
    for picture in (shares_picture(spent), gantt_picture(*model.pieces())):
        assert len(re.findall(r">replica \d+</text>", picture)) == MOST_SHOWN
        assert ">replica 70<" in picture
        assert "and 64 other replicas, which differ less" in picture


def test_the_timeline_keeps_fewer_events_of_each_of_many_replicas() -> None:
    model = TimelineModel()
    for steps in (390, 400):
        for replica in range(200):
            model.feed(sample_of(replica, steps))
    assert sum(len(track.events) for track in model._tracks.values()) < 200 * 700
    spent = model.spent()
    assert spent is not None
    assert spent.steps == 10


def test_a_request_for_the_latest_steps_gets_their_events() -> None:
    events = sample_of(0, 12).events
    assert [each[6] for each in of_steps(events, 3) if each[1] == "step"] == [9, 10, 11, 12]
    assert of_steps(events, 12) == events


def test_missing_replicas_at_one_place_share_a_sentence() -> None:
    model = WaitsModel()
    for now in (0.0, 5.0):
        for replica in range(100):
            waiting = waits(now) if replica == 40 else None
            model.feed(sample_of(replica, 4 + replica % 2 if replica != 40 else 4, waiting=waiting), now)
    (line,) = model.lines(5.0)
    assert line.startswith("replica 40 has waited in all_reduce (cell 1, line 4; number 7) for 5 s; replicas 0, 2, 4")
    assert "98 have not arrived: they have been in cell 1, line 4, for 5 s; replicas 1, 3, 5" in line
    assert line.endswith("99 have not arrived: they have been in cell 1, line 5, for 5 s.")


def test_missing_replicas_at_many_places_are_counted() -> None:
    model = WaitsModel()
    for replica in range(20):
        model.feed(sample_of(replica, replica + 1, waiting=waits(9.0) if replica == 0 else None), 9.0)
    assert model.lines(9.0)[0].endswith("cell 1, line 6, for 0 s; 14 more have not arrived.")


def test_samples_of_large_teams_are_rare_and_remain_valid_longer() -> None:
    assert (sample_period_s(2), sample_period_s(100), sample_period_s(1000)) == (0.2, 0.2, 2.0)
    model = WaitsModel()
    for replica in range(1000):
        model.feed(sample_of(replica, 1, waiting=waits(4.0)), 4.0)
    assert "all have arrived" in model.lines(8.0)[0]
    assert model.lines(11.0) == []


# -- output --------------------------------------------------------------------------------------------------------------


def _out(replica: int, text: str) -> Output:
    return Output(engine=replica, program=1, replica=replica, stream="stdout", text=text)


def _text(instructions: list[Any]) -> str:
    return "".join(getattr(each, "text", "") for each in instructions)


def test_lines_of_large_teams_wait_longer_for_equal_ones() -> None:
    assert (output_period_s(2), output_period_s(200), output_period_s(1000)) == (0.05, 0.05, 0.25)
    merger = OutputMerger(1000, "m")
    for replica in range(999):
        merger.feed(_out(replica, "hello\n"), 0.0)
    assert _text(merger.collect(FIRST_S)) == "[0-998] hello\n"
    for replica in range(999):
        merger.feed(_out(replica, "hello\n"), 2.0)
    assert merger.collect(2.0 + HOLD_S * 4.9) == []
    assert _text(merger.collect(2.0 + HOLD_S * 5.1)) == "[0-998] hello\n"


def test_the_lines_of_all_replicas_together_are_limited() -> None:
    merger = OutputMerger(25, "m")
    for replica in range(25):
        merger.feed(_out(replica, "".join(f"{number} of {replica}\n" for number in range(500))), 0.0)
    lines = _text(merger.collect(0.0, final=True)).splitlines()
    assert 5_000 < len(lines) < 9_000
    (note,) = [line for line in lines if line.startswith("…")]
    assert int(note.split()[3].replace(",", "")) + len(lines) - 1 == 25 * 500
    assert lines[-1] == "[24] 499 of 24"


def test_equal_lines_of_all_replicas_count_once_in_the_limit() -> None:
    merger = OutputMerger(20, "m")
    for replica in range(20):
        merger.feed(_out(replica, "".join(f"{number}\n" for number in range(900))), 0.0)
    assert _text(merger.collect(0.0)).count("\n") == 900


def test_unfinished_lines_of_many_replicas_are_counted() -> None:
    merger = OutputMerger(100, "m")
    for replica in range(100):
        merger.feed(_out(replica, f"\r{replica}%"), 0.0)
    (area,) = merger.collect(0.5)
    assert area.lines[0] == "[0] 0%"
    assert area.lines[-1] == "… and 68 more unfinished lines"
    assert len(area.lines) == 33


# -- messages, tables and limits -----------------------------------------------------------------------------------------


def test_a_large_team_is_small_on_the_wire_and_equal_there() -> None:
    team = team_of(1000)
    assert len(pickle.dumps(team)) < 4_000
    assert pickle.loads(pickle.dumps(team)) == team
    assert [team.rank_of(engine) for engine in (0, 999)] == [0, 999]
    with pytest.raises(ValueError, match="Engine 1000 is not in the team"):
        team.rank_of(1000)


def engines(count: int, *, busy: int = -1, hosts: int = 8) -> list[EngineStatus]:
    state = "busy with program 3, which was ended"
    return [
        EngineStatus(
            engine=number,
            device=f"cuda:{number % hosts}",
            pid=number,
            host=f"node-{number // hosts}",
            state=state if number == busy else "idle",
        )
        for number in range(count)
    ]


def test_few_engines_are_listed_one_by_one() -> None:
    rows = engines(3, hosts=2)
    assert ready_text(rows) == "0 on cuda:0 of node-0, 1 on cuda:1 of node-0, 2 on cuda:0 of node-1"
    assert ready_text(engines(2)) == "0 on cuda:0, 1 on cuda:1"
    assert status_rows(rows, {})[2] == ["2", "", "cuda:0", "idle", "", "", "2", "node-1"]


def test_many_engines_are_listed_by_machine() -> None:
    assert ready_text(engines(1000)) == "8 on each of 125 machines, node-0 to node-124"
    assert ready_text(engines(20, hosts=8)) == "4 to 8 on each of 3 machines, node-0 to node-2"
    assert ready_text(engines(17, hosts=17)) == "on cuda:0 to cuda:16"
    rows = status_rows(engines(1000, busy=10), {})
    assert len(rows) == 126
    assert rows[0] == ["0-7", "", "cuda:0-7", "idle", "", "", "", "node-0"]
    assert rows[1] == ["8-9, 11-15", "", "cuda:0-1, 3-7", "idle", "", "", "", "node-1"]
    assert rows[2] == ["10", "", "cuda:2", "busy with program 3, which was ended", "", "", "10", "node-1"]


def test_the_limit_of_open_files_is_raised_for_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 100_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    raise_file_limit(8)
    assert len(limits) == 1
    raise_file_limit(1000)
    assert 1000 * FILES_PER_ENGINE < limits[-1][0] < 1000 * FILES_PER_ENGINE + 3_000
    assert limits[-1][1] == 100_000
    limits.append((1024, 4096))
    with pytest.raises(StartError, match=r"1000 engines may need 6,\d+ open files .* the system allows 4,096"):
        raise_file_limit(1000)
    assert open_files.resource is resource


def test_the_guardian_ends_processes_whose_descriptors_are_high() -> None:
    """Check descriptors above 1,023, for which `select` cannot wait."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, 2_000), most))
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    threading.Thread(target=process.wait, daemon=True).start()
    low = end_descriptor(process.pid)
    try:
        owned = _Owned()
        owned._leaders[process.pid] = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1_500)
        owned.end_all()
        os.close(owned._leaders[process.pid])
    finally:
        os.close(low)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        if process.poll() is None:
            process.kill()
    assert process.wait() == -signal.SIGKILL

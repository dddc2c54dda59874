"""The view of a coordinator in a cell: its model, the picture of its queue, and the times of its updates."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distnb.runtime import step_count
from distnb.servers.coordinator.status import CoordinatorStatus, WorkerStatus
from distnb.servers.notebook.closures_drawing import largest, runs_text, server_texts, worker_table
from distnb.servers.notebook.closures_model import ClosuresModel
from distnb.servers.notebook.coordinator_watch import CoordinatorWatch
from distnb.servers.notebook.queue_picture import queue_picture
from distnb.servers.variables.here import servers_here
from distnb.servers.variables.shard_placement import PlacedShard
from distnb.views.live_model import LiveModel
from distnb.widgets.cell_view import CellView
from distnb.widgets.content import head_text, picture_bundle, plain_summary
from distnb.widgets.live_views import PictureView
from distnb.widgets.publisher import Publisher
from distnb.wire.messages import Live, Output, TelemetrySample, Waiting

IDLE, LOST = (
    WorkerStatus(worker=0, state="idle", done=10),
    WorkerStatus(worker=1, state="lost", done=14, how="was killed by SIGKILL"),
)
BEFORE = CoordinatorStatus(
    waiting=0,
    running=0,
    done=20,
    failed=0,
    cancelled=0,
    retried=1,
    workers=(IDLE, WorkerStatus(worker=1, state="idle", done=10)),
    mean_staleness=0.0,
    max_staleness=0,
    lost_servers=(),
    steps=15,
)


def status(
    waiting: int = 0, running: int = 0, done: int = 20, workers: tuple[WorkerStatus, ...] = (), **more: Any
) -> CoordinatorStatus:
    known = {"failed": 0, "cancelled": 0, "retried": 1, "mean_staleness": 0.0, "max_staleness": 0, "steps": 15, **more}
    return CoordinatorStatus(waiting=waiting, running=running, done=done, workers=workers or BEFORE.workers, **known)


# -- the model ---------------------------------------------------------------------------------------------------------


def test_a_cell_counts_the_closures_that_ended_in_it_and_all_pending_ones() -> None:
    model = ClosuresModel(BEFORE)
    assert (model.under_way, model.queue_text(), model.staleness_text()) == (False, "", "")
    model.feed(status(1204, 6, 810, retried=3, cancelled=2, steps=815, mean_staleness=0.94, max_staleness=3), 1.0)
    assert model.under_way
    assert model.queue_text() == "790 done · 2 cancelled · 6 running · 1,204 waiting · 2 retried"
    assert model.staleness_text() == "staleness 0.9 (max 3)"
    assert model.steps == 800


def test_the_rate_covers_the_last_seconds_and_finally_the_whole_time() -> None:
    model = ClosuresModel(BEFORE)
    assert model.closures_per_second() == 0
    for second in range(11):
        model.feed(status(100, 2, 20 + (10 * second if second < 6 else 50)), float(second))
    assert model.closures_per_second() == 0
    model.feed(status(done=120), 12.0)
    assert model.closures_per_second() == 100 / 12


def test_the_closure_of_a_worker_is_described_in_words() -> None:
    workers = (
        IDLE,
        WorkerStatus(worker=1, state="running", closure="train_step", seconds=0.2),
        LOST,
        WorkerStatus(worker=3, state="stuck"),
    )
    words = ["idle", "train_step", "lost: was killed by SIGKILL", "stuck in a closure that was ended"]
    assert [runs_text(each) for each in workers] == words


SHARDS = tuple(
    PlacedShard(name=name, shape=(size,), dtype=torch.float32, server=server, nbytes=4 * size, updates=7)
    for name, size, server in [("table/part_0", 500, 0), ("table/part_1", 500, 1), ("bias", 3, 0)]
)


def test_servers_are_described_by_their_contents() -> None:
    assert server_texts(SHARDS) == {0: "2 shards, 2.0 kB", 1: "1 shard, 2.0 kB"}
    assert [each.name for each in largest(SHARDS, 2)] == ["table/part_0", "table/part_1"]
    assert largest(SHARDS[::-1], 3) == list(SHARDS[::-1])
    assert SHARDS[1].device == "/job:ps/replica:0/task:1/device:CPU:0"


def test_the_status_line_estimates_the_time_of_the_queue_without_a_loop_over_epochs() -> None:
    model = LiveModel()
    closures = ClosuresModel(BEFORE)
    model.follow(closures, "parameter_server", 0.0)
    for second in range(4):
        closures.feed(status(98, 2, 20 + 5 * second), float(second))
    assert head_text(model, 3.0).endswith(" · 5.0 closures/s · 20.0 s left of the queue")
    for waiting, running, done in ((0, 2, 50), (98, 2, 50)):  # nothing waits, or nothing is done for long
        for second in range(4, 12):
            closures.feed(status(waiting, running, done), float(second))
        assert "left" not in head_text(model, 12.0)
    closures.feed(status(98, 2, 90), 13.0)
    assert "left of the queue" in head_text(model, 13.0)
    model.end(13.0, failed=False)
    assert "left" not in head_text(model, 13.0)


def test_the_status_line_shows_the_progress_of_a_loop_over_epochs() -> None:
    model = LiveModel()
    earlier = step_count.Reading(epoch=9, batch=500, batches=500, epochs=10)
    closures = ClosuresModel(replace(BEFORE, reading=earlier))
    model.follow(closures, "parameter_server", 0.0)
    closures.feed(status(4, 2, 20, reading=earlier), 0.0)
    model.sampled(0.0)
    assert "epoch" not in head_text(model, 0.0)
    for second in range(3):
        closures.feed(
            status(
                4, 2, 20 + 5 * second, reading=step_count.Reading(epoch=1, batch=5 * second, batches=500, epochs=10)
            ),
            float(second),
        )
        model.sampled(float(second))
    text = head_text(model, 2.0)
    assert " · epoch 2 of 10 · batch 10 of 500 · 14 min 58 s left · " in text
    assert "queue" not in text


@pytest.mark.parametrize(("replicas", "who"), [(1, "worker 3"), (2, "replica 3")])
def test_waits_name_workers_if_workers_have_one_replica(replicas: int, who: str) -> None:
    model = LiveModel()
    model.follow(ClosuresModel(replace(BEFORE, replicas_per_worker=replicas)), "parameter_server", 0.0)
    model.feed(
        TelemetrySample(
            engine=3,
            program=1,
            replica=3,
            seconds=5.0,
            steps=0,
            examples=0,
            rss_nbytes=10,
            waiting=Waiting(kind="servers", what="parameter server 0", where="", group="", number=0, seconds=4.0),
        ),
        5.0,
    )
    assert model.waits.lines(5.0) == [f"{who} has waited for parameter server 0 for 4 s."]


# -- the picture -------------------------------------------------------------------------------------------------------


def test_the_queue_is_drawn_as_a_bar_of_all_closures() -> None:
    counts = {"done": 750, "failed": 1, "cancelled": 0, "running": 0, "waiting": 249, "retried": 2}
    svg = ET.fromstring(queue_picture(counts, "staleness 1.0 (max 2)"))
    bars = {each.get("class"): each for each in svg.iter() if each.get("class") in counts}
    assert list(bars) == ["done", "failed", "waiting"]
    widths = {name: float(bar.get("width", "")) for name, bar in bars.items()}
    assert abs(sum(widths.values()) - 480) < 0.2
    assert abs(widths["done"] / widths["waiting"] - 3) < 0.1
    assert widths["failed"] > 3
    assert "".join(svg.itertext()) == "●750 done●1 failed●249 waiting↻2 retriedstaleness 1.0 (max 2)"


def followed() -> LiveModel:
    model = LiveModel(devices={0: "cpu:0", 1: "cpu:1"})
    closures = ClosuresModel(BEFORE)
    model.follow(closures, "parameter_server", 0.0)
    workers = (WorkerStatus(worker=0, state="running", closure="<lambda>", seconds=2.25, done=30), LOST)
    closures.feed(status(4, 2, 60, workers, steps=45, mean_staleness=1.0, max_staleness=2), 0.0)
    closures.feed(status(4, 2, 60, workers, steps=45, mean_staleness=1.0, max_staleness=2), 4.0)
    closures.place(SHARDS)
    model.feed(
        TelemetrySample(engine=0, program=5, replica=0, seconds=1.0, steps=20, examples=640, rss_nbytes=300_000_000),
        4.0,
    )
    model.feed(Live(engine=0, program=5, replica=0, points=((20, 0, {"loss": 0.5}),)), 4.0)
    return model


def test_each_worker_has_a_row() -> None:
    model = followed()
    assert head_text(model, 4.0) == "parameter_server · 2 workers · running · 4.0 s · 30 steps"
    assert isinstance(model.work, ClosuresModel)
    header, rows = worker_table(model, model.work)
    assert header == ["worker", "device", "runs", "for", "done", "steps", "memory", "loss"]
    assert rows[0] == ["0", "cpu:0", "<lambda>", "2.2 s", "20", "20", "300 MB", "0.5"]
    assert rows[1] == ["1", "", "lost: was killed by SIGKILL", "", "4", "", "", ""]


def test_the_last_picture_is_complete_also_in_plain_text() -> None:
    model = followed()
    assert isinstance(model.work, ClosuresModel)
    workers = (WorkerStatus(worker=0, state="idle", done=30), LOST)
    model.work.feed(status(0, 0, 60, workers, failed=1, lost_servers=(1,)), 5.0)
    model.end(5.0, failed=True)
    bundle = picture_bundle(model, 5.0)
    assert bundle["text/plain"] == plain_summary(model, 5.0)
    assert bundle["text/plain"].splitlines()[1:] == [
        "loss: 0.5",
        "closures: 40 done · 1 failed",
        "worker 0: 20 done, idle",
        "worker 1: 4 done, lost: was killed by SIGKILL",
        "ps 0: 2 shards, 2.0 kB",
        "ps 1: lost",
    ]
    assert ">failed</span>" in bundle["text/html"]
    assert "table/part_1" not in bundle["text/html"]
    for text in ("table/part_0", "[500]", "ps 0: 2 shards, 2.0 kB · ps 1: lost", 'alt="40 done · 1 failed"'):
        assert text in bundle["text/html"]


# -- updates -----------------------------------------------------------------------------------------------------------


class Kept(Publisher):
    def __init__(self) -> None:
        self.shown: list[str] = []

    def write(self, stream: str, text: str) -> None:
        self.shown.append(text)

    def display(self, name: str, data: Any, metadata: Any, *, update: bool = False) -> None:
        self.shown.append(data["text/plain"])

    def area(self, lines: tuple[str, ...]) -> None:
        pass

    def clear(self, wait: bool) -> None:
        pass


class Coordinator:
    """A replacement coordinator with a settable state, which counts its readings."""

    strategy = SimpleNamespace(spec=SimpleNamespace(kind="parameter_server"))

    def __init__(self) -> None:
        self.current = BEFORE
        self.reads = 0
        self.asked = 0
        self.asking: set[threading.Thread] = set()
        self.answers = threading.Event()
        self.answers.set()

    def status(self) -> CoordinatorStatus:
        self.reads += 1
        return self.current

    def placement(self) -> tuple[PlacedShard, ...]:
        self.asked += 1
        self.asking.add(threading.current_thread())
        self.answers.wait(30)
        return SHARDS


Watching = tuple[Coordinator, CellView, Kept]


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Watching:
    coordinator, kept = Coordinator(), Kept()
    monkeypatch.setattr(servers_here, "access", SimpleNamespace(requests=coordinator))
    view = CellView(kept, PictureView, workers={0: 0, 1: 1})
    view.watch(CoordinatorWatch(coordinator), 0.0)  # type: ignore[arg-type]
    coordinator.current = status(5, 2, 30)
    return coordinator, view, kept


def test_a_view_appears_while_closures_run_and_updates_now_and_then(watching: Watching) -> None:
    coordinator, view, kept = watching
    for tick in range(40):
        view.tick(tick * 0.05)
        for thread in {*threading.enumerate(), *coordinator.asking}:  # an ending thread is alive and not enumerated
            if thread.name == "distnb-placement":
                thread.join()
        assert (not kept.shown) == (tick < 10)
        assert not view.idle
    assert coordinator.reads <= 12
    assert coordinator.asked == 2
    assert "closures: 10 done · 2 running · 5 waiting" in kept.shown[-1]


def test_a_view_is_idle_from_the_end_of_all_closures_until_the_next(watching: Watching) -> None:
    coordinator, view, _ = watching
    view.tick(0.6)
    coordinator.current = status(done=37)
    for now in (1.0, 2.0):
        view.tick(now)
    assert view.idle
    assert not view.watches(coordinator)  # type: ignore[arg-type]
    reads = coordinator.reads
    view.tick(3.0)
    assert coordinator.reads == reads
    view.watch(CoordinatorWatch(coordinator), 4.0)  # type: ignore[arg-type]
    coordinator.current = status(2, 2, 37)
    view.tick(4.0)
    assert view.watches(coordinator)  # type: ignore[arg-type]
    assert isinstance(view.model.work, ClosuresModel)
    assert view.model.work.counts()["done"] == 17


def test_a_short_cell_shows_nothing_and_sends_servers_no_request(watching: Watching) -> None:
    coordinator, view, kept = watching
    view.tick(0.1)
    coordinator.current = status(done=27)
    view.finish(0.2, failed=False)
    assert (kept.shown, coordinator.asked) == ([], 0)


def test_a_hanging_server_does_not_block_the_view(watching: Watching) -> None:
    coordinator, view, kept = watching
    coordinator.answers.clear()
    for now in (0.6, 0.9, 2.0, 4.0):
        view.tick(now)
    coordinator.current = status(done=27)
    view.finish(5.0, failed=False)
    assert coordinator.asked == 1
    assert "· ended ·" in kept.shown[-1]
    coordinator.answers.set()


def test_prints_of_closures_are_marked_by_worker(watching: Watching) -> None:
    _, view, kept = watching
    view.feed(Output(engine=0, program=7, replica=0, stream="stdout", text="both\nmine\n"), 0.1)
    view.feed(Output(engine=1, program=8, replica=1, stream="stdout", text="both\n"), 0.1)
    view.flush(0.4)
    assert "".join(kept.shown).splitlines() == ["[worker 0-1] both", "[worker 0] mine"]

"""The tables and texts of a coordinator's closures in the view of a cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from distnb.views.live_model import LiveModel, ReplicaRow
from distnb.views.wording import filled, html_table, human_bytes, note_html, short_number, whole_number

if TYPE_CHECKING:
    from distnb.servers.coordinator.status import WorkerStatus
    from distnb.servers.notebook.closures_model import ClosuresModel
    from distnb.servers.variables.shard_placement import PlacedShard

__all__ = ["largest", "runs_text", "server_texts", "shards_html", "worker_table", "workers_html"]

_MOST_SHARDS = 10
_SHORT_S = 0.05  # shorter running times of closures are not shown


def runs_text(worker: WorkerStatus) -> str:
    """Return a worker's current closure or state in words."""
    if worker.state == "lost":
        return f"lost: {worker.how}"
    if worker.state == "stuck":
        return "stuck in a closure that was ended"
    return worker.closure or "idle"


def server_texts(shards: Iterable[PlacedShard]) -> dict[int, str]:
    """Return the content of each server in words, by its index: `4 shards, 412 kB`."""
    by_server: dict[int, list[int]] = {}
    for each in shards:
        by_server.setdefault(each.server, []).append(each.nbytes)
    return {
        server: f"{len(sizes)} shard{'s' if len(sizes) > 1 else ''}, {human_bytes(sum(sizes))}"
        for server, sizes in sorted(by_server.items())
    }


def largest(shards: Sequence[PlacedShard], most: int = _MOST_SHARDS) -> list[PlacedShard]:
    """Return the largest shards, in the order of their creation."""
    chosen = sorted(range(len(shards)), key=lambda place: -shards[place].nbytes)[:most]
    return [shards[place] for place in sorted(chosen)]


def worker_table(model: LiveModel, closures: ClosuresModel) -> tuple[list[str], list[list[str]]]:
    """Return the column titles and a row for each worker of a coordinator."""
    header = ["worker", "device", "runs", "for", "done", "steps", "examples/s", "memory", "on device", *model.curves]
    rows = []
    for worker in closures.status.workers:
        first_replica = worker.worker * closures.replicas_per_worker
        row = model.rows.get(first_replica) or ReplicaRow(replica=worker.worker)
        rows.append(
            [
                str(worker.worker),
                row.device,
                runs_text(worker),
                f"{worker.seconds:.1f} s" if worker.seconds >= _SHORT_S else "",
                f"{closures.done_by(worker.worker):,}",
                whole_number(row.steps),
                whole_number(row.examples_per_second()),
                human_bytes(row.rss_nbytes),
                human_bytes(row.device_nbytes),
                *(short_number(row.values.get(name)) for name in model.curves),
            ]
        )
    return filled(header, rows)


def workers_html(model: LiveModel, closures: ClosuresModel) -> str:
    """Return the table of the workers as HTML."""
    header, rows = worker_table(model, closures)
    return html_table(header, rows, numeric=set(header) - {"device", "runs"})


def shards_html(closures: ClosuresModel) -> str:
    """Return the table of the largest shards on the servers as HTML."""
    shards = largest(closures.shards)
    rest = len(closures.shards) - len(shards)
    rows = [
        [each.name, str(list(each.shape)), f"ps {each.server}", human_bytes(each.nbytes), f"{each.updates:,}"]
        for each in shards
    ]
    header, caption = ["variable", "shape", "on", "size", "updates"], " · ".join(closures.servers())
    table = html_table(header, rows, numeric=("size", "updates"), caption=caption)
    return table + note_html(f"and {rest:,} smaller ones (see strategy.placement())" if rest else "")

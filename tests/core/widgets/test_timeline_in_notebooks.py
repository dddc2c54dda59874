"""A notebook's view of its replicas' time: the straggler by name, who waits for whom, traces, and the failed line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

_SETUP = """%%distribute mirrored
import time, torch
from pathlib import Path
with strategy.scope():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step():
    if distnb.replica_id() == 1:
        time.sleep(0.03)
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook(engines=2, env={"OMP_NUM_THREADS": "1"}) as made:
        processes.OF_MODULE.add(made.pid)
        made.run("import distnb\n%distnb live picture")
        made.run(_SETUP)
        yield made


def shown_when(notebook: Notebook, message: str, text: str) -> str:
    """Read a running cell's messages until a display contains a text, and return that display."""
    shown = ""
    for kind, content in notebook.events(message, 60):
        if kind in ("display_data", "update_display_data"):
            shown = str(content["data"].get("text/plain"))
            if text in shown:
                return shown
    raise AssertionError(f"the cell ended before {text!r} was shown, last of all: {shown}")


def test_a_sleeping_replica_is_named_within_ten_steps_and_each_wait_is_kept(notebook: Notebook, tmp_path: Path) -> None:
    ran = notebook.run(
        f"%%distribute mirrored --timeline --profile {tmp_path}\nfor step in range(10):\n    strategy.run(train_step)\n"
        "time.sleep(0.6)"
    ).check()
    last = ran.displays[-1]
    assert "Replica 1 is the straggler: replica 0 waits " in last["text/plain"]
    assert "data:image/svg+xml" in last["text/html"]
    for replica in (0, 1):
        trace = json.loads(gzip.decompress((tmp_path / f"replica_{replica}.pt.trace.json.gz").read_bytes()))
        assert any("AddmmBackward" in str(each.get("name")) for each in trace["traceEvents"])
        assert f"replica_{replica}.pt.trace.json.gz" in ran.stdout
    notebook.run("timeline = distnb.timeline(5)")
    assert notebook.value("(timeline.spent.steps, timeline.spent.straggler.replica)") == (5, 1)
    waited = notebook.value("[[own['waiting'], own['compute']] for own in timeline.spent.seconds.values()]")
    assert waited[0][0] > 5 * 0.02 > waited[1][0]
    assert waited[1][1] > 5 * 0.03
    assert "all_reduce" in notebook.value("str({row.what for row in timeline.rows})")
    saved = tmp_path / "trace.json"
    assert "intervals written to" in notebook.run(f"%distnb timeline --steps 3 --save {saved}").text
    spans = [each for each in json.loads(saved.read_text())["traceEvents"] if each["ph"] == "X"]
    assert {each["pid"] for each in spans} == {0, 1}
    assert "Replica 1 is the straggler" in notebook.run("%distnb timeline").text


def test_a_blocked_collective_is_reported_while_the_cell_runs(notebook: Notebook, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    message = notebook.start(f"""%%distribute mirrored
def meet():
    while distnb.replica_id() == 0 and Path({str(held)!r}).exists():
        time.sleep(0.5)
    distnb.get_replica_context().all_reduce("sum", torch.ones(2))
strategy.run(meet)""")
    shown = shown_when(notebook, message, "replica 1 has waited in all_reduce")
    held.unlink()
    (line,) = [line for line in shown.splitlines() if line.startswith("replica 1 has waited")]
    assert ", line 5; number " in line
    assert "; replica 0 has not arrived: it has been in cell " in line
    assert ", line 4, in time.sleep, for " in line
    ran = notebook.finish(message).check()
    assert "waited in" not in ran.displays[-1]["text/plain"]


def test_a_missing_batch_is_reported_while_the_cell_runs(notebook: Notebook, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    message = notebook.start(f"""%%distribute mirrored
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        while index >= 4 and distnb.replica_id() == 0 and Path({str(held)!r}).exists():
            time.sleep(0.05)
        return torch.ones(4)
for batch in strategy.distribute_dataset(torch.utils.data.DataLoader(Rows(), batch_size=4)):
    losses = strategy.run(lambda rows: rows.sum(), args=(batch,))
    strategy.reduce("sum", losses, axis=None)""")
    shown = shown_when(notebook, message, "replica 0 has waited for its next batch")
    if "replica 1 has waited in " not in shown:
        shown = shown_when(notebook, message, "replica 1 has waited in ")
    held.unlink()
    assert "; replica 0 has not arrived: it has waited for its next batch (cell " in shown
    notebook.finish(message).check()


def test_the_view_shows_the_failing_line(notebook: Notebook) -> None:
    ran = notebook.try_run("""%%distribute mirrored
def divide(by):
    return 1 / by

time.sleep(0.6)
strategy.run(lambda: divide(1 - distnb.replica_id()))""")
    assert ran.error_name == "ZeroDivisionError"
    (page,) = [data["text/html"] for data in ran.displays[-2:] if "failed" in data.get("text/html", "")][-1:]
    assert ", line 3</td>" in page

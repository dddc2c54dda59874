"""Values of replicas, and their places, as a notebook shows them: on two engines, through a user's code."""

from __future__ import annotations

import re

import pytest

from tests.support.kernel import Notebook, Ran

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SETUP = """%%distribute mirrored
import distnb, torch
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    loss = model(torch.randn(5, 4)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()
losses = strategy.run(step)
model[1].running_mean.fill_(distnb.replica_id())
"""


def page(ran: Ran) -> str:
    """Return the page of the last display that has one."""
    return str([data["text/html"] for data in ran.displays if "distnb-" in data.get("text/html", "")][-1])


def pages(ran: Ran) -> list[str]:
    return [data["text/html"] for data in ran.displays if "distnb-value" in data.get("text/html", "")]


@pytest.fixture(scope="module")
def made(notebook: Notebook) -> Notebook:
    notebook.run("import distnb, torch")
    notebook.run(SETUP)
    return notebook


def test_a_handle_is_drawn_and_keeps_its_text(made: Notebook) -> None:
    ran = made.run("losses")
    assert "PerReplica on 2 replicas" in page(ran)
    assert {"replica 0", "replica 1"} <= set(re.findall(r"replica \d", page(ran)))
    assert ran.displays[-1]["text/plain"].startswith("PerReplica:{\n  0: tensor(")


def test_a_module_is_shown_as_its_layers_with_norms(made: Notebook) -> None:
    drawn = page(made.run("model"))
    assert drawn.count("<details") == 3
    assert "21 parameters" in drawn
    assert "grad norm" in drawn
    assert "DRIFT" not in drawn, "each replica's own running statistics are not drift"
    norm = made.value("round(torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item(), 3)")
    shown = re.search(r"21 parameters · \d+ B · norm ([\d.]+)", drawn)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(norm, rel=2e-3)


def test_drawing_transfers_no_values(made: Notebook) -> None:
    made.run("%%distribute mirrored\nlarge = strategy.run(lambda: torch.randn(3000, 1000))")
    length = made.value("len(large._repr_html_())")
    assert length < 200_000, "of 24 MB"
    assert "histogram from" in page(made.run("large"))


def test_drift_is_reported_with_the_replica(made: Notebook) -> None:
    try:
        made.run(
            "%%distribute mirrored\nwith torch.no_grad():\n    if distnb.replica_id() == 1:\n        model[0].bias[0] += 1"
        )
        drawn = page(made.run("model"))
        assert "DRIFT: replica 1 differs from replica 0" in drawn
        assert "#ef4444" in drawn
    finally:
        made.run("%%distribute mirrored\nmodel.load_state_dict(strategy.broadcast(model.state_dict()))")
    assert "DRIFT" not in page(made.run("model"))


def test_parts_of_replicas_form_one_picture_in_a_cell(made: Notebook) -> None:
    ran = made.run(
        """%%distribute mirrored
import time
if distnb.replica_id() == 1:
    time.sleep(0.4)
display(strategy.run(lambda: torch.full((2,), distnb.replica_id())))
distnb.visualize(model)
if distnb.is_chief():
    display(distnb.PerReplica({0: 7}, 2))
display(strategy.run(lambda: torch.ones(2)))
strategy.run(lambda: {"x": 5})"""
    )
    latest: dict[str, str] = {}
    for data in ran.displays:
        drawn = data.get("text/html", "")
        if "distnb-value" in drawn or "distnb-placement" in drawn:
            latest[re.sub(r"\d+", "", drawn)[:60] + str(len(latest))] = drawn
    shown = list(latest.values())
    assert any("replica 0" in each and "replica 1" in each and "[1, 1]" in each for each in shown)
    assert any("replicas 0–1" in each and "[1., 1.]" in each for each in shown)
    assert any("each of 2 replicas" in each and "mirrored copy" in each for each in shown)
    chiefs = [each for each in shown if ">7<" in each]
    assert chiefs
    assert all("replica 1" not in each for each in chiefs), "a value shown by the chief alone is separate"
    assert "vnd.distnb" not in str(ran.displays)


def test_sync_on_read_variables_do_not_drift(made: Notebook) -> None:
    made.run(
        """%%distribute mirrored
with strategy.scope():
    total = distnb.Variable(0.0, synchronization="on_read", aggregation="sum")
strategy.run(lambda: total.assign_add(float(distnb.replica_id() + 1)))"""
    )
    drawn = page(made.run("total"))
    assert "DRIFT" not in drawn
    assert "A read combines the parts" in drawn


def test_visualize_shows_the_parts_of_each_replica(made: Notebook) -> None:
    text = made.run("distnb.visualize(model)").text
    assert text.splitlines()[0] == "Sequential on 2 replicas · each of 2 replicas: 116 B"
    assert re.search(r"0\.weight +\(3, 4\) +float32 +all +replicas 0–1 +cpu +48 B +mirrored copy", text)
    assert re.search(r"1\.running_mean .* replicas 0–1 +cpu +12 B\n", text), (
        "one value per replica, not a mirrored copy"
    )
    assert "['exp_avg']" in made.run("distnb.visualize(optimizer)").text
    ran = made.try_run("distnb.visualize('text')")
    assert (ran.error_name, "without any tensor" in ran.error_text) == ("OptionError", True)


def test_rows_of_a_batch_and_of_a_dataset_are_shown(made: Notebook) -> None:
    text = made.run(
        """strategy = distnb.MirroredStrategy()
dataset = strategy.distribute_dataset(torch.utils.data.DataLoader(torch.arange(7.0), batch_size=4))
distnb.visualize(dataset)"""
    ).text
    assert re.search(r"1 batch of 4 rows +\(4,\) +rows 0–1 +replica 0 .*\n +rows 2–3 +replica 1", text)
    assert re.search(r"the last batch +\(3,\) +rows 0–1 +replica 0 .*\n +row 2 +replica 1", text)
    assert made.value("[b.numpy()[0].tolist() for b in dataset][0]") == [0.0, 1.0], "nothing was consumed"
    ran = made.run("*_, last = dataset\ndistnb.visualize(last)")
    assert re.search(r"\(3,\) +float32 +rows 0–1 +replica 0 .*\n +row 2 +replica 1", ran.text)
    assert "data:image/svg+xml" in page(ran)


def test_shards_of_a_dtensor_and_its_statistics_are_shown(made: Notebook) -> None:
    ran = made.run(
        """%%distribute mirrored
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2,))
sharded = distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(0)])
distnb.visualize(sharded)"""
    )
    pattern = (
        r"\(5, 7\) +float32 +\[0:3, :\] +replica 0 +cpu +84 B .*\n +\[3:5, :\] +replica 1 +cpu +56 B +shard, Shard\(0\)"
    )
    assert re.search(pattern, ran.text)
    assert re.search(pattern, made.run("distnb.visualize(sharded)").text)
    drawn = page(made.run("sharded"))
    assert "this part: (2, 7)" in drawn
    assert ">34<" in drawn, "the largest element of replica 1's part"


def test_central_storage_is_shown_as_one_memory(made: Notebook) -> None:
    text = made.run(
        """%%distribute central_storage
with strategy.scope():
    once = torch.nn.Linear(4, 3)
optimizer_of_once = torch.optim.SGD(once.parameters(), lr=0.1)
strategy.run(lambda: once(torch.ones(1, 4)).sum().backward())
optimizer_of_once.step()
distnb.visualize(once)"""
    ).text
    assert "shared memory: 60 B" in text
    assert "updates it" in text
    assert "shared memory: 60 B" in made.run("distnb.visualize(once)").text


def test_devices_show_memory_and_variables(made: Notebook) -> None:
    text = made.run("%distnb devices").text
    assert re.search(r"cpu:0 +engine 0 +.*model 116 B", text)
    assert re.search(r"memory of .*: \[[#=.]{40}\] engine 0: \d+ MB · engine 1: \d+ MB · .*free: ", text)
    assert "replica 1" in made.run("distnb.visualize(distnb.MirroredStrategy())").text


def test_the_default_strategy_draws_its_own_values(made: Notebook) -> None:
    ran = made.run("%%distribute default\ndisplay(distnb.PerReplica([torch.ones(2)]))\ndistnb.visualize(torch.ones(2))")
    assert "PerReplica on 1 replica" in pages(ran)[0]
    assert "this process" in ran.text


def test_a_default_cell_gets_the_combined_value_of_the_replicas(notebook: Notebook) -> None:
    notebook.run(
        "%%distribute mirrored\nimport distnb, torch, torchmetrics\nwith strategy.scope():\n"
        "    mean, largest = distnb.metrics.Mean(), torchmetrics.MetricCollection([distnb.metrics.Max()])\n"
        "    count = distnb.Variable(0.0, synchronization='on_read', aggregation='sum')\n"
        "def step():\n    mean.update(distnb.replica_id() + 1.0)\n    largest.update(distnb.replica_id() + 1.0)\n"
        "    count.assign_add(1.0)\nstrategy.run(step)"
    )
    assert "Mean()" in notebook.run("mean").text
    said = notebook.run(
        "%%distribute default\nprint(float(mean.compute()), float(largest.compute()['Max']), float(count))\n"
        "mean.update(3.0)\ncount.assign_add(1.0)\nprint(float(mean.compute()), float(count))"
    )
    assert "1.5 2.0 2.0\n2.0 3.0\n" in said.stdout
    assert notebook.value("(float(mean.compute()), float(count))") == (1.5, 2.0), "the replicas' objects are unchanged"

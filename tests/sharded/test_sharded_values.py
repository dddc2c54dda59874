"""The notebook sees a sharded object as one value, and gathers only what it reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Notebook, Ran

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

PROGRAM = """
torch.manual_seed(0)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
inputs, targets = torch.randn(8, 5), torch.randn(8, 4)
dataset = strategy.distribute_dataset(torch.utils.data.TensorDataset(inputs, targets), batch_size=4)

def step(batch):
    x, y = batch
    optimizer.zero_grad()
    loss = distnb.nn.compute_average_loss(((model(x) - y) ** 2).sum(1), global_batch_size=4)
    loss.backward()
    optimizer.step()
    return loss.detach()

losses = [strategy.reduce("sum", strategy.run(step, (batch,)), axis=None).item() for batch in dataset]
weight, state = model[0].weight, model.state_dict()
total = weight.sum()
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook(4) as notebook:
        notebook.run(
            "import torch\nimport distnb\nthirds = distnb.ShardedStrategy(['cpu:0', 'cpu:1', 'cpu:2'], min_size=0)"
        )
        yield notebook


@pytest.fixture(autouse=True)
def trained(notebook: Notebook) -> None:
    notebook.run(f"%%distribute thirds\n{PROGRAM}")


def printed(notebook: Notebook, source: str) -> str:
    return notebook.run(source).stdout.strip()


def test_values_are_those_of_default(notebook: Notebook) -> None:
    read = """
print([round(loss, 4) for loss in losses])
print([[round(x, 3) for x in torch.as_tensor(p.tolist()).flatten().tolist()] for p in model.parameters()])
print([round(x, 3) for x in optimizer.state_dict()["state"][0]["exp_avg"].tolist()[0]])
print({name: tuple(value.shape) for name, value in state.items()}, round(float(total.detach()), 3), f"{total.item():.3f}")
print(weight.detach().numpy().shape, weight.dtype, len(weight), tuple(weight[0].shape), round(float((2 * weight).sum().detach()), 3))
"""
    got = printed(notebook, read)
    notebook.run("del model, optimizer, weight, state, total")
    notebook.run(f"%%distribute default\n{PROGRAM}")
    assert got == printed(notebook, read)


def test_handles_are_one_value(notebook: Notebook) -> None:
    kinds = "print([isinstance(each, distnb.Mirrored) for each in (model, optimizer, weight, total)])"
    assert printed(notebook, kinds) == "[True, True, True, True]"
    text = printed(notebook, "print(model)\nprint(weight)\nprint(total)")
    assert "FSDP" not in text
    assert text.startswith("Sharded(Sequential(")
    assert re.search(r"\bmodel +sharded +Sequential\b", notebook.run("%distnb variables").text)
    assert "(7, 5)" in text
    whole = "[whole] = {type(each) for each in thirds.local_results(model)[0].parameters()}\nprint(whole.__name__)"
    assert printed(notebook, whole) == "Parameter"


def test_a_default_cell_works_on_a_whole_copy(notebook: Notebook) -> None:
    changed = printed(
        notebook,
        """%%distribute default
before = model[0].weight.detach().clone()
print(type(model).__name__, type(model[0].weight).__name__, optimizer.param_groups[0]["params"][0] is model[0].weight)
print(type(optimizer.state[model[0].weight]["exp_avg"]).__name__, len(model[0]._forward_hooks))
model(torch.ones(2, 5)).sum().backward()
optimizer.step()
print(bool((model[0].weight != before).any()))
""",
    )
    assert "Sequential Parameter True\nTensor 0\nTrue" in changed
    notebook.run(f"%%distribute default\n{PROGRAM}")
    notebook.run(f"%%distribute thirds\n{PROGRAM}")
    assert printed(notebook, "print(type(thirds.local_results(weight)[0]).__name__, len(losses))") == "Parameter 2"


def test_replicas_in_sync_and_the_picture(notebook: Notebook) -> None:
    notebook.run("thirds.assert_in_sync((model, optimizer))")
    grouped = """
grouped = distnb.ShardedStrategy(min_size=0, replicas_per_group=2)
with grouped.scope():
    pair = torch.nn.Linear(3, 4)
"""
    notebook.run(grouped)
    notebook.run("grouped.assert_in_sync(pair)")
    with pytest.raises(AssertionError, match="different copies of the same shard"):
        notebook.run(
            "%%distribute grouped\nwith torch.no_grad():\n    pair.weight.to_local().add_(distnb.replica_id())\n"
            "strategy.assert_in_sync(pair)"
        )


def test_the_picture_names_shards_and_units(notebook: Notebook) -> None:
    text = notebook.run("distnb.visualize(model)").displays[-1]
    assert "gathered with" in str(text)
    assert "Shard(0)" in str(text)


def test_shards_of_a_lost_engine_are_restored_from_a_checkpoint(notebook: Notebook, tmp_path: Path) -> None:
    save = f"""%%distribute thirds
path = distnb.Checkpoint(model=model, optimizer=optimizer).save({str(tmp_path / "checkpoint")!r})
losses = [strategy.reduce("sum", strategy.run(step, (batch,)), axis=None).item() for batch in dataset]
"""
    notebook.run(save)
    expected = printed(notebook, "print([round(loss, 5) for loss in losses])")
    with pytest.raises(AssertionError, match="EngineDied"):
        notebook.run(
            "%%distribute thirds\nimport os, signal\n\ndef lost(batch):\n    out = model(batch[0])\n"
            "    if distnb.replica_id() == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
            "    out.sum().backward()\n\nfor batch in dataset:\n    strategy.run(lost, (batch,))"
        )
    with pytest.raises(AssertionError, match="StaleHandleError"):
        notebook.run("thirds.local_results(model)")
    replaced = notebook.run("%distnb restart --missing")
    assert "DeviceMesh" not in replaced.stdout + replaced.stderr
    assert "Sharded(Sequential(" in printed(notebook, "print(model)")
    cure = r"are lost.* distnb.Checkpoint\(model=model, optimizer=optimizer\).restore\(path\)"
    cell = "%%distribute thirds\n"
    for use in (
        "optimizer.state_dict()['state'][0]['exp_avg'].numpy()",
        f"{cell}distnb.Checkpoint(model=model).write({str(tmp_path / 'lost')!r})",
        f"{cell}strategy.run(lambda: model(torch.ones(2, 5)))",
        f"{cell}weight.tolist()",
        f"{cell}strategy.run(optimizer.step)",
        "%%distribute default\nmodel(torch.ones(2, 5))",
    ):
        used = notebook.try_run(use)
        assert used.error_name == "StaleHandleError", use
        assert re.search(cure, used.error_text), used.error_text
    restore = save.replace(".save(", ".restore(").replace(repr(str(tmp_path / "checkpoint")), "saved")
    notebook.run("saved = path")
    notebook.run(restore.replace("optimizer=optimizer", "").partition("losses")[0])
    with pytest.raises(AssertionError, match=f"the state of this Adam {cure}"):
        notebook.run(restore.partition("\n")[0] + "\n" + restore[restore.index("losses") :])
    notebook.run(restore)
    assert printed(notebook, "print([round(loss, 5) for loss in losses])") == expected
    assert "UserWarning" not in notebook.run(f"%%distribute thirds\n{PROGRAM}").stderr


def test_a_model_that_was_never_called_outlives_a_failed_program(notebook: Notebook) -> None:
    unused = "with strategy.scope():\n    unused = torch.nn.Linear(5, 4)"
    notebook.run(f"%%distribute thirds\n{unused}")
    with pytest.raises(AssertionError, match="on purpose"):
        notebook.run("%%distribute thirds\nif distnb.replica_id() == 1:\n    raise ValueError('on purpose')")
    notebook.run("%%distribute thirds\nstrategy.run(lambda: unused(torch.ones(2, 5)))")


def test_shards_of_different_steps_are_reported(notebook: Notebook) -> None:
    torn = """%%distribute thirds
def torn(batch):
    model(batch[0]).sum().backward()
    if distnb.replica_id() == 1:
        raise ValueError("on purpose")
    optimizer.step()

strategy.run(torn, (next(iter(dataset)),))"""
    with pytest.raises(AssertionError, match="on purpose"):
        notebook.run(torn)
    warned = notebook.run("%%distribute thirds\nstrategy.run(lambda: model(torch.ones(2, 5)))").stderr
    assert "The shards of Sequential do not belong together: a program ended in the middle of a step" in warned


def test_a_programs_own_dtensors_have_a_component_on_each_replica(notebook: Notebook) -> None:
    own = """%%distribute thirds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

own = distribute_tensor(torch.zeros(6, 2), init_device_mesh("cpu", (3,)), [Shard(0)])
"""
    notebook.run(own)
    assert printed(notebook, "print(isinstance(own, distnb.Mirrored))") == "False"


def test_another_strategy_is_refused(notebook: Notebook) -> None:
    notebook.run("copies = distnb.MirroredStrategy(['cpu:0', 'cpu:1', 'cpu:2'])")
    with pytest.raises(AssertionError, match="of another strategy"):
        notebook.run("%%distribute copies\nstrategy.run(lambda: model(torch.ones(2, 5)))")


def test_a_large_gathering_is_announced(notebook: Notebook) -> None:
    limit = "import distnb.sharded.whole_copies as copies\nkept = copies.device_memory"
    notebook.run(f"%%distribute thirds\n{limit}\ncopies.device_memory = lambda: (100, 100)")
    assert (
        "gathering the whole Sequential in host memory: 0.0 GB, more than the device (0.0 GB)"
        in read(notebook, "model").stderr
    )
    assert "gathering" not in notebook.run("model[2].bias.numpy()").stderr
    notebook.run("%%distribute thirds\ncopies.device_memory = kept")
    assert "gathering" not in read(notebook, "model").stderr


def read(notebook: Notebook, name: str) -> Ran:
    return notebook.run(f"%%distribute default\n{name} = {name}")


def test_training_continues_after_the_stop_button(notebook: Notebook) -> None:
    step = PROGRAM[PROGRAM.index("def step") : PROGRAM.index("losses =")]
    running = notebook.start(f"""%%distribute thirds
{step}
while True:
    for batch in dataset:
        strategy.run(step, (batch,))
    print("trains", flush=True)""")
    notebook.wait_for_output(running, "trains")
    notebook.interrupt()
    assert notebook.finish(running).error_name == "KeyboardInterrupt"
    notebook.run(f"%%distribute thirds\n{PROGRAM[PROGRAM.index('def step') :]}")
    assert printed(notebook, "print(len(losses))") == "2"


@pytest.mark.parametrize("has_reset", [True, False])  # torch has `reset_iter_state` from version 2.13 on
def test_training_continues_after_errors(notebook: Notebook, has_reset: bool) -> None:
    if not has_reset:
        notebook.run("""%%distribute thirds
from torch.distributed.fsdp import FSDPModule
method = FSDPModule.__dict__.get("reset_iter_state")
if method is not None:
    del FSDPModule.reset_iter_state""")
    try:
        check_errors(notebook)
    finally:
        if not has_reset:
            notebook.run("%%distribute thirds\nif method is not None:\n    FSDPModule.reset_iter_state = method")


def check_errors(notebook: Notebook) -> None:
    for place in ("model(x)", "loss.backward()", "optimizer.step()"):
        failing = PROGRAM[PROGRAM.index("def step") : PROGRAM.index("losses =")]
        line = next(each for each in failing.splitlines() if place in each)
        failing = failing.replace(line, f"    assert distnb.replica_id() != 1, 'on purpose'\n{line}")
        with pytest.raises(AssertionError, match="on purpose"):
            notebook.run(f"%%distribute thirds\n{failing}\nfor batch in dataset:\n    strategy.run(step, (batch,))")
        again = PROGRAM[PROGRAM.index("def step") :]
        after = notebook.run(f"%%distribute thirds\n{again}")
        assert ("The shards of Sequential" in after.stderr) == (place == "optimizer.step()"), after.stderr
        assert printed(notebook, "print(losses[0] > losses[1] or losses[1] < 20)") == "True"

"""Checkpoints of sharded models, written and read in parts, and models in safetensors files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

# 11 rows, and 2, do not divide among 3 or 4 replicas. The embedding and the head are tied.
DEFINITIONS = """
import os, signal, torch, distnb

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.narrow = torch.nn.Linear(6, 2)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].weight.requires_grad_(False)
        self.register_buffer("calls", torch.tensor(5))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean() + self.narrow(x).square().mean()

def optimizer_of(model):
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.Adam([{"params": trained[:2]}, {"params": trained[2:], "lr": 0.3}], lr=0.1)

def sharded(model, mesh=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def made(mesh=None, seed=0):
    torch.manual_seed(seed)
    model = sharded(Net(), mesh)
    return model, optimizer_of(model)

def train(model, optimizer, steps=1):
    for _ in range(steps):
        model(torch.arange(8)).backward()
        optimizer.step()
        optimizer.zero_grad()

def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().double().tolist()

def state(model, optimizer):
    moments = {
        f"{number} {name}": whole(each)
        for number, kept in optimizer.state_dict()["state"].items() for name, each in kept.items()
    }
    rates = [group["lr"] for group in optimizer.param_groups]
    return {name: whole(each) for name, each in model.state_dict().items()}, moments, rates
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def cells(folder: Path) -> Iterator[Notebook]:
    with Notebook(4, env={"OMP_NUM_THREADS": "1"}) as notebook:
        notebook.run(f"FOLDER = {str(folder)!r} + '/'" + DEFINITIONS)
        yield notebook


def parts(path: Path) -> list[str]:
    return sorted(each.name for each in path.glob("*.safetensors"))


def test_checkpoints_are_restored_under_any_strategy_and_number_of_replicas(cells: Notebook, folder: Path) -> None:
    cells.run(
        "%%distribute mirrored -n 2\nstrategy = distnb.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "with strategy.scope():\n    torch.manual_seed(0)\n    model = Net()\n    optimizer = optimizer_of(model)\n"
        "strategy.run(lambda: None)\ntrain(model, optimizer, 2)\n"
        "distnb.Checkpoint(model=model, optimizer=optimizer).write(FOLDER + 'mirrored')\nsaved = state(model, optimizer)"
    )
    cells.run(
        "%%distribute mirrored\nmodel, optimizer = made(seed=1)\nmodel(torch.arange(8))  # FSDP keeps the root gathered\n"
        "checkpoint = distnb.Checkpoint(model=model, optimizer=optimizer)\n"
        "checkpoint.restore(FOLDER + 'mirrored').assert_consumed()\nrestored = state(model, optimizer)\n"
        "model(torch.arange(8))\ncheckpoint.write(FOLDER + 'four')"
    )
    assert cells.value("restored") == cells.value("saved")
    assert len(parts(folder / "four")) == 4
    cells.run(
        "%%distribute mirrored -n 3\nmodel, optimizer = made(seed=2)\ntrain(model, optimizer)\n"
        "checkpoint = distnb.Checkpoint(model=model, optimizer=optimizer)\n"
        "checkpoint.restore(FOLDER + 'four').assert_consumed()\nrestored = state(model, optimizer)\n"
        "train(model, optimizer)\ncheckpoint.write(FOLDER + 'three')\ntrained = state(model, optimizer)"
    )
    assert cells.value("restored") == cells.value("saved")
    cells.run(
        "%%distribute default\nmodel = Net()\noptimizer = optimizer_of(model)\n"
        "checkpoint = distnb.Checkpoint(model=model, optimizer=optimizer)\n"
        "checkpoint.restore(FOLDER + 'three').assert_consumed()\nalone = state(model, optimizer)\n"
        "checkpoint.restore(FOLDER + 'four')\ntrain(model, optimizer)\nlike_three = state(model, optimizer)\n"
        "tied = model.head.weight is model.embedding.weight"
    )
    assert cells.value("alone == trained and tied") is True
    close = cells.value("[like_three, trained]")
    assert torch.allclose(*(torch.tensor(each[0]["head.weight"]) for each in close))
    cells.run(
        "%%distribute mirrored\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('copies', 'parts'))\nmodel, optimizer = made(mesh, seed=3)\n"
        "checkpoint = distnb.Checkpoint(model=model, optimizer=optimizer)\ncheckpoint.restore(FOLDER + 'three')\n"
        "restored = state(model, optimizer)\ncheckpoint.write(FOLDER + 'hybrid')"
    )
    assert cells.value("restored == trained") is True
    assert len(parts(folder / "hybrid")) == 2, "only the first group writes"


def test_each_replica_writes_its_part(folder: Path) -> None:
    held = []
    for name in parts(folder / "three"):
        with safe_open(folder / "three" / name, "pt") as file:
            held.append({key: tuple(file.get_slice(key).get_shape()) for key in file.keys()})  # noqa: SIM118
    assert [each["model/embedding.weight"] for each in held] == [(4, 6), (4, 6), (3, 6)]
    assert [each["optimizer/state/0/exp_avg"] for each in held] == [(4, 6), (4, 6), (3, 6)]
    assert [each.get("model/narrow.bias") for each in held] == [(1,), (1,), None], "an empty part is not written"
    assert [name for name in held[0] if name not in held[1]] == [
        "model/calls",
        *(f"optimizer/state/{number}/step" for number in range(6)),
    ]
    assert not any("head" in name for each in held for name in each), "a tied tensor is written once"
    manifest = json.loads((folder / "three/checkpoint.json").read_text())
    assert (manifest["version"], list(manifest["holds"]["files"])) == (1, parts(folder / "three"))


LIMITED = """%%distribute mirrored
import resource, psutil
class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(16_000_000))
from torch.distributed.fsdp import fully_shard
with torch.device("meta"):
    model = fully_shard(Wide())
model.to_empty(device="cpu")
torch.nn.init.constant_(model.weight, 1.0 + distnb.replica_id())
def within(nbytes, do):
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes, before[1]))
    try:
        return do()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
checkpoint = distnb.Checkpoint(model=model)
within(24_000_000, lambda: checkpoint.write(FOLDER + "wide"))
model.weight.detach().zero_()
within(24_000_000 + 64_000_000, lambda: checkpoint.restore(FOLDER + "wide"))  # the mapped files count
found = torch.equal(model.weight.to_local(), torch.full((4_000_000,), 1.0 + distnb.replica_id()))
try:
    within(24_000_000, lambda: torch.ones(16_000_000))
    fits = True
except (RuntimeError, MemoryError):
    fits = False
"""


def test_no_replica_holds_a_whole_tensor(cells: Notebook) -> None:
    """Save and restore 16 MB on each replica with less memory than the 64 MB of the whole."""
    cells.run(LIMITED)
    assert cells.value("found") is True
    assert cells.value("fits") is False, "the limit works"


def test_checkpoints_are_written_in_the_background(cells: Notebook, folder: Path) -> None:
    cells.run(
        "%%distribute mirrored -n 3\nmodel, optimizer = made()\n"
        "manager = distnb.CheckpointManager(distnb.Checkpoint(model=model), FOLDER + 'background', max_to_keep=2)\n"
        "for _ in range(4):\n    train(model, optimizer)\n    saved = state(model, optimizer)[0]\n"
        "    manager.save(wait=False)\ntrain(model, optimizer)\nmanager.wait()\n"
        "used = manager.restore_or_initialize()\nrestored = state(model, optimizer)[0]"
    )
    assert cells.value("restored == saved and os.path.basename(used)") == "ckpt-4"
    assert sorted(os.listdir(folder / "background")) == ["ckpt-3", "ckpt-4"]
    assert len(parts(folder / "background/ckpt-4")) == 3
    # The newest one is damaged in the part of another replica than the one that restores the rows.
    damaged = folder / "background/ckpt-4" / parts(folder / "background/ckpt-4")[2]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    ran = cells.run(
        "%%distribute mirrored -n 3\nmodel, optimizer = made()\n"
        "manager = distnb.CheckpointManager(distnb.Checkpoint(model=model), FOLDER + 'background')\n"
        "used = manager.restore_or_initialize()"
    )
    assert cells.value("os.path.basename(used)") == "ckpt-3"
    assert "distnb uses an older checkpoint" in ran.stderr + ran.text
    damaged.unlink()
    ran = cells.try_run("%%distribute mirrored -n 3\nmanager.checkpoint.restore(FOLDER + 'background/ckpt-4')")
    assert ran.error_name == "CheckpointError"
    assert f"not complete: {damaged.name} has 0 bytes" in ran.error_text


def test_no_object_changes_if_a_shape_differs(cells: Notebook) -> None:
    cells.run(
        "%%distribute mirrored -n 3\nmodel, optimizer = made()\nbefore = state(model, optimizer)\n"
        "other = Net()\nother.narrow = torch.nn.Linear(6, 3)\nother = sharded(other)\nfailure = ''\ntry:\n"
        "    distnb.Checkpoint(optimizer=optimizer, model=other).restore(FOLDER + 'three')\n"
        "except distnb.errors.CheckpointMismatchError as error:\n    failure = str(error)\n"
        "unchanged = state(model, optimizer) == before"
    )
    assert "narrow.weight has shape [2, 6] in the checkpoint and [3, 6] here" in cells.value("failure")
    assert cells.value("unchanged") is True


FAILING = """%%distribute mirrored -n 3
import safetensors.torch
save_file = safetensors.torch.save_file
def failing(tensors, file, metadata=None):
    if distnb.replica_id() != 1:
        return save_file(tensors, file, metadata=metadata)
    open(file, "wb").write(b"half")
    {failure}
model, optimizer = made()
manager = distnb.CheckpointManager(distnb.Checkpoint(model=model, optimizer=optimizer), FOLDER + "failing")
if manager.latest_checkpoint is None:
    train(model, optimizer)
    manager.save()
    saved = state(model, optimizer)
train(model, optimizer)
safetensors.torch.save_file = failing
try:
    manager.save(wait={wait})
    manager.wait()
finally:
    safetensors.torch.save_file = save_file
"""


@pytest.mark.parametrize("wait", [True, False])
def test_a_replica_that_cannot_write_leaves_no_checkpoint(cells: Notebook, folder: Path, wait: bool) -> None:
    ran = cells.try_run(FAILING.format(failure="raise OSError(28, 'No space left on device')", wait=wait))
    assert ran.error_name == "OSError"
    assert "No space left" in ran.error_text
    assert sorted(os.listdir(folder / "failing")) == ["ckpt-1"]


def test_a_replica_killed_in_mid_save_leaves_the_earlier_checkpoint(cells: Notebook, folder: Path) -> None:
    ran = cells.try_run(FAILING.format(failure="os.kill(os.getpid(), signal.SIGKILL)", wait=True))
    assert ran.error_name == "EngineDied"
    assert [each for each in os.listdir(folder / "failing") if not each.startswith(".")] == ["ckpt-1"]
    cells.run("%distnb restart --missing", timeout_s=60)
    cells.run(
        "%%distribute mirrored -n 3\nmodel, optimizer = made(seed=4)\n"
        "manager = distnb.CheckpointManager(distnb.Checkpoint(model=model, optimizer=optimizer), FOLDER + 'failing')\n"
        "manager.restore_or_initialize()\nrestored = state(model, optimizer)\npath = manager.save()"
    )
    assert cells.value("restored == saved and os.path.basename(path)") == "ckpt-2"
    assert sorted(os.listdir(folder / "failing")) == ["ckpt-1", "ckpt-2"]


def tensors_in(folder: Path) -> dict[str, Any]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def test_a_model_is_exported_and_loaded_into_shards(cells: Notebook, folder: Path) -> None:
    cells.run(
        "%%distribute mirrored -n 3\nmodel, optimizer = made()\nmodel.blocks[0].half()\nvalues = state(model, optimizer)[0]\n"
        "distnb.export_safetensors(model, FOLDER + 'one')\n"
        "distnb.export_safetensors(model, FOLDER + 'several', max_file_nbytes=300)"
    )
    values = cells.value("values")
    assert os.listdir(folder / "one") == ["model.safetensors"]
    index = json.loads((folder / "several/model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == parts(folder / "several")
    assert parts(folder / "several")[0] == "model-00001-of-00003.safetensors"
    for exported in (tensors_in(folder / "one"), tensors_in(folder / "several")):
        assert set(exported) == set(values) - {"head.weight"} == set(index["weight_map"])
        assert {name: each.double().tolist() for name, each in exported.items()} == {
            name: each for name, each in values.items() if name != "head.weight"
        }
        assert exported["blocks.0.weight"].dtype == torch.float16
    # Into shards with and without memory, into a mirrored model, and in one process
    cells.run(
        "%%distribute mirrored\nmodel, optimizer = made(seed=5)\nmodel.blocks[0].half()\n"
        "distnb.load_safetensors(model, FOLDER + 'several')\nrestored = state(model, optimizer)[0]\n"
        "with torch.device('meta'):\n    model = sharded(Net())\nmodel.blocks[0].half()\n"
        "names = distnb.load_safetensors(model, FOLDER + 'several')\noptimizer = optimizer_of(model)\n"
        "made_of_meta = state(model, optimizer)[0]\nmodel.blocks[0].float()\ntrain(model, optimizer)\n"
        "tied = model.head.weight is model.embedding.weight\nfrozen = not model.blocks[1].weight.requires_grad"
    )
    assert cells.value("restored == made_of_meta == values and tied and frozen and list(names)") == [(), ()]
    cells.run(
        "with distnb.MirroredStrategy().scope():\n    copies = Net().double()\n"
        "names = distnb.load_safetensors(copies, FOLDER + 'one')\n"
        "distnb.export_safetensors(copies, FOLDER + 'copies')\nalone = Net()\n"
        "distnb.load_safetensors(alone, FOLDER + 'several/model.safetensors.index.json')"
    )
    assert cells.value("{name: whole(each) for name, each in alone.state_dict().items()} == values") is True
    assert tensors_in(folder / "copies")["blocks.0.weight"].tolist() == values["blocks.0.weight"]


REFUSED = {
    "del other.narrow": "Net does not have narrow.weight, narrow.bias|Net does not have narrow.bias, narrow.weight",
    "other.narrow = torch.nn.Linear(6, 9)": r"narrow.weight has shape \[2, 6\] in the files and \[9, 6\] here",
    "other.more = torch.nn.Linear(1, 1)": "The files do not hold more.weight, more.bias",
}


def test_files_that_do_not_match_are_refused_on_all_replicas(cells: Notebook, folder: Path) -> None:
    for change, message in REFUSED.items():
        ran = cells.try_run(
            f"%%distribute mirrored -n 3\nother = Net()\n{change}\nother = sharded(other)\n"
            "distnb.load_safetensors(other, FOLDER + 'one')"
        )
        assert ran.error_name == "CheckpointMismatchError"
        assert re.search(message, ran.error_text), ran.error_text
    names = cells.run(
        "%%distribute mirrored -n 3\nother = Net()\nother.more = torch.nn.Linear(1, 1)\ndel other.narrow\n"
        "names = distnb.load_safetensors(other, FOLDER + 'one', strict=False)"
    )
    assert names.status == "ok"
    assert cells.value("list(map(sorted, names))") == [["more.bias", "more.weight"], ["narrow.bias", "narrow.weight"]]
    missing = folder / "several" / parts(folder / "several")[1]
    missing.unlink()
    ran = cells.try_run("%%distribute mirrored -n 3\ndistnb.load_safetensors(sharded(Net()), FOLDER + 'several')")
    assert ran.error_name == "CheckpointError"
    assert f"There is no file {missing}" in ran.error_text
    ran = cells.try_run("%%distribute mirrored -n 3\ndistnb.export_safetensors(sharded(Net()), FOLDER + 'one')")
    assert ran.error_name == "OptionError"
    assert "holds model.safetensors already" in ran.error_text

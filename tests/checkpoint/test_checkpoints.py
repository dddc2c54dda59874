"""Checkpoints on disk: their content, torn and damaged ones, retention, and a SIGKILL at each moment."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import TestCase

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import distnb
from distnb.checkpoint import files, folder_locks
from distnb.checkpoint.tensor_slices import TensorSlice
from distnb.checkpoint.trees import encode
from distnb.errors import CheckpointError, OptionError
from tests.support.processes import wait_until


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        bytes_ = torch.uint8 if one.dtype.itemsize == 1 else one.dtype  # torch compares no small floats
        return torch.equal(one.view(bytes_), other.view(bytes_))
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other)))


base = torch.arange(12.0)
TREES: dict[str, Any] = {
    "plain": {"none": None, "yes": True, "n": 2**70, "x": 0.1, "text": "ö", "list": [1, [2]], "pair": (1, ("a",))},
    "no JSON": {"nan": math.nan, "inf": -math.inf, "bytes": b"\x00\xff", "dtype": torch.bfloat16},
    "keys": {0: {"step": 1}, "$": 2, (1, "a"): 3, "a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
    "dtypes": [torch.ones(2, 3, dtype=each) for each in (torch.bfloat16, torch.float16, torch.int8, torch.bool)],
    "small floats": [
        torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(getattr(torch, name))
        for name in ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2", "float8_e5m2")
    ],
    "unsigned": [torch.ones(2, dtype=each) for each in (torch.uint16, torch.uint32, torch.uint64)],
    "shapes": [torch.tensor(3.0), torch.empty(0, 3), torch.empty(2, 0)],
    "views": [base, base[2:5], base.reshape(3, 4).T, base.expand(2, 12), base],
    "complex": [
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj().resolve_conj(),
        torch.ones(1, dtype=torch.complex128),
    ],
    "arrays": [np.arange(3), np.float32(2.5), np.ones((2, 2), dtype=">i4").astype("i4"), np.zeros(0)],
    "random states": [torch.get_rng_state(), list(np.random.get_state()[:2])],
    "nothing": {},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_written_checkpoint_is_read_back(tmp_path: Path, tree: Any) -> None:
    files.write(tmp_path / "one", tree)
    assert same(files.read(tmp_path / "one"), tree)
    assert {each.suffix for each in (tmp_path / "one").iterdir()} <= {".json", ".safetensors"}
    assert os.listdir(tmp_path) == ["one"]


REFUSED = {
    "a function": ({"model": {"f": print}}, "model/f"),
    "a set": ([{1}], "'0'"),
    "a sparse tensor": ({"s": torch.ones(2, 2).to_sparse()}, "'s'"),
    "a dtype that files lack": ({"d": torch.empty(2, dtype=torch.bits8)}, "'d': it is a tensor of torch.bits8"),
    "objects": ({"o": np.array([None])}, "'o'"),
}


@pytest.mark.parametrize(("tree", "message"), REFUSED.values(), ids=REFUSED)
def test_objects_that_cannot_be_saved_are_named_and_leave_no_file(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        files.write(tmp_path / "one", tree)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("kind", [distnb.Mirrored, distnb.PerReplica])
def test_values_of_replicas_are_refused_before_a_file_is_written(kind: Any) -> None:
    with pytest.raises(OptionError, match=f"cannot hold value: it is a {kind.__name__}"):
        distnb.Checkpoint(value=kind([torch.ones(2), torch.ones(2)]))


def written_by_several(path: Path, parts: list[dict[str, TensorSlice]]) -> None:
    """Write a checkpoint as several replicas do, each with its slices."""
    unfinished = files.begin(path)
    facts = {}
    for number, slices in enumerate(parts, 1):
        described, tensors = encode(slices)
        name = files.name_of_part(number, len(parts))
        facts[name] = files.write_part(unfinished / name, files.held_here(tensors, chief=number == 1))
    files.complete(unfinished, path, facts, described)


def cut(whole: torch.Tensor, axis: int, sizes: list[int]) -> list[TensorSlice]:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    offsets = [tuple(start * (each == axis) for each in range(whole.dim())) for start in starts]
    locals_ = whole.split(sizes, dim=axis)
    return [
        TensorSlice(local, offset, tuple(whole.shape), bool(local.numel()))
        for local, offset in zip(locals_, offsets, strict=True)
    ]


def test_slices_are_joined_into_one_tensor_by_any_reader(tmp_path: Path) -> None:
    table, vector, wide = torch.arange(39.0).reshape(13, 3), torch.ones(2), torch.arange(20).reshape(4, 5)
    turns = torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(3, 2)
    rows = [
        {"table": one, "more": {"vector": two}, "turns": three}
        for one, two, three in zip(
            cut(table, 0, [3, 3, 3, 2, 2]), cut(vector, 0, [1, 1, 0, 0, 0]), cut(turns, 0, [1, 0, 2, 0, 0]), strict=True
        )
    ]
    written_by_several(tmp_path / "one", rows)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 5
    assert json.loads((tmp_path / "one/checkpoint.json").read_text())["version"] == 1, "older versions read it, too"
    read = files.read(tmp_path / "one")
    assert same(read, {"table": table, "more": {"vector": vector}, "turns": turns})
    alone = {"table": torch.empty(13, 3)}
    with pytest.warns(UserWarning, match="single process"):
        state_dict_loader.load(alone, storage_reader=HuggingFaceStorageReader(str(tmp_path / "one")))
    assert torch.equal(alone["table"], table), "torch.load reads them, too"
    written_by_several(tmp_path / "two", [{"wide": each} for each in cut(wide, 1, [2, 2, 1])])
    assert json.loads((tmp_path / "two/checkpoint.json").read_text())["version"] == 2
    assert same(files.read(tmp_path / "two"), {"wide": wide})


def test_a_part_of_a_stored_tensor_is_read_across_slices(tmp_path: Path) -> None:
    table = torch.arange(42.0).reshape(14, 3)
    turns = torch.complex(table, -table)
    parts = zip(cut(table, 0, [5, 5, 4]), cut(turns, 1, [1, 1, 1]), strict=True)
    written_by_several(tmp_path / "one", [{"table": one, "turns": two} for one, two in parts])
    for share in range(2):
        stored = files.stored(tmp_path / "one", share, 2)
        assert stored["turns"].shape == (14, 3)
        for first, size in (((4, 0), (7, 3)), ((9, 1), (5, 2)), ((14, 0), (0, 3)), ((0, 0), (14, 3))):
            window = tuple(slice(a, a + n) for a, n in zip(first, size, strict=True))
            assert same(stored["table"].read(first, size), table[window].clone())
            assert same(stored["turns"].read(first, size), turns[window].clone())


def test_together_the_replicas_find_every_damage(tmp_path: Path) -> None:
    table = torch.arange(4000.0).reshape(1000, 4)
    written_by_several(tmp_path / "one", [{"table": each} for each in cut(table, 0, [400, 600])])
    for number in (1, 2):
        file = tmp_path / "one" / files.name_of_part(number, 2)
        flip(file, -1)
        found = []
        for share in range(3):
            try:
                files.stored(tmp_path / "one", share, 3)
            except CheckpointError as error:
                found.append(str(error))
        assert len(found) == 1
        assert f"the bytes of 'table' in {file.name}" in found[0]
        flip(file, -1)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"not complete: {file.name} has 0 bytes"):
        files.stored(tmp_path / "one", 0, 3)


def test_the_last_replica_completes_a_checkpoint_in_the_background(tmp_path: Path) -> None:
    table = torch.arange(8.0).reshape(4, 2)
    described, _ = encode({"table": cut(table, 0, [4])[0]})
    unfinished, path = files.begin(tmp_path / "one"), tmp_path / "one"
    for number, each in enumerate(cut(table, 0, [2, 2]), 1):
        assert not files.complete_from_notes(unfinished, path, 2)
        name = files.name_of_part(number, 2)
        assert name in files.missing_parts(unfinished, 2)
        facts = files.write_part(unfinished / name, files.held_here({"table": each}, chief=number == 1))
        files.leave_note(unfinished, name, facts, described if number == 1 else None)
    assert files.complete_from_notes(unfinished, path, 2)
    assert not files.complete_from_notes(unfinished, path, 2), "it is complete"
    assert same(files.read(path), {"table": table})
    assert {each.suffix for each in path.iterdir()} == {".json", ".safetensors"}


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def first_file(path: Path) -> Path:
    return min(path.glob("*.safetensors"))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "no such file"),
    "a file": (lambda path: (shutil.rmtree(path), path.write_text("hello")), "not a checkpoint of distnb"),
    "an empty folder": (lambda path: (shutil.rmtree(path), path.mkdir()), "no checkpoint.json"),
    "foreign": (lambda path: (path / "checkpoint.json").write_text('{"epoch": 1}'), "not a checkpoint of distnb"),
    "no JSON": (lambda path: (path / "checkpoint.json").write_text('{"epoch": '), "not complete"),
    "deep JSON": (lambda path: (path / "checkpoint.json").write_text("[" * 100_000), "not complete"),
    "a folder as description": (
        lambda path: ((path / "checkpoint.json").unlink(), (path / "checkpoint.json").mkdir()),
        "not a checkpoint of distnb: checkpoint.json is not a file",
    ),
    "a pipe as description": (
        lambda path: ((path / "checkpoint.json").unlink(), os.mkfifo(path / "checkpoint.json")),
        "not a checkpoint of distnb: checkpoint.json is not a file",
    ),
    "a newer version": (
        lambda path: (path / "checkpoint.json").write_text('{"format": "distnb checkpoint", "version": 9}'),
        "version 9",
    ),
    "another number in the text": (
        lambda path: (path / "checkpoint.json").write_text(
            (path / "checkpoint.json").read_text().replace("0.125", "0.126")
        ),
        "damaged",
    ),
    "cut off": (lambda path: os.truncate(first_file(path), 100), "not complete"),
    "a file gone": (lambda path: first_file(path).unlink(), "not complete"),
    "a bit of a tensor": (lambda path: flip(first_file(path), -1), "'model/weight'"),
    "a bit of the header": (lambda path: flip(first_file(path), 12), "the header of"),
    "another shape in the header": (
        lambda path: first_file(path).write_bytes(first_file(path).read_bytes().replace(b"[1,1]", b"[1,0]")),
        "the header of",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_and_foreign_files_are_reported_and_the_newest_complete_checkpoint_is_used(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    manager = distnb.CheckpointManager(distnb.Checkpoint(model=model, optimizer=optimizer), tmp_path)
    for number in (1.0, 2.0):
        torch.nn.init.constant_(model.weight, number)
        manager.save()
    newest = Path(manager.latest_checkpoint or "")
    damage(newest)
    torch.nn.init.zeros_(model.weight)
    with pytest.raises(CheckpointError, match=message):
        manager.checkpoint.restore(newest)
    assert model.weight.item() == 0, "no part of it was restored"
    with pytest.warns(UserWarning, match="distnb uses an older checkpoint"):
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert model.weight.item() == 1
    again = distnb.CheckpointManager(manager.checkpoint, tmp_path)
    number = 3 if newest.exists() else 2
    if newest.exists():
        torch.nn.init.zeros_(model.weight)
        with pytest.warns(UserWarning, match="distnb uses an older checkpoint"):
            assert again.restore_or_initialize() == str(tmp_path / "ckpt-1")
        assert model.weight.item() == 1
    assert again.save() == str(tmp_path / f"ckpt-{number}")
    assert again.restore_or_initialize() == distnb.latest_checkpoint(tmp_path) == again.latest_checkpoint


def test_damaged_checkpoints_alone_are_an_error_and_are_kept(tmp_path: Path) -> None:
    checkpoint = distnb.Checkpoint(value=distnb.Variable(1))
    first, second = [distnb.CheckpointManager(checkpoint, tmp_path).save() for _ in range(2)]
    for path in first, second:
        os.truncate(first_file(Path(path)), 100)
    manager = distnb.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    assert manager.latest_checkpoint is None
    with pytest.raises(CheckpointError, match=r"ckpt-2 is not complete"):
        manager.restore_or_initialize()
    assert manager.save() == str(tmp_path / "ckpt-3")
    assert manager.save() == str(tmp_path / "ckpt-4")
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == ["ckpt-1", "ckpt-2", "ckpt-4"]
    assert checkpoint.save(tmp_path / "ckpt") == str(tmp_path / "ckpt-5")


@pytest.mark.parametrize("nbytes", [0, 100_000], ids=["in the description", "in the tensors"])
def test_a_full_disk_is_reported_with_its_path(tmp_path: Path, nbytes: int) -> None:
    tree = {"value": torch.zeros(nbytes, dtype=torch.uint8), "text": "" if nbytes else "x" * 100_000}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            files.write(tmp_path / "one", tree)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value.filename).startswith(str(tmp_path / ".one.unfinished-"))
    assert not os.listdir(tmp_path)


def test_a_path_without_its_number_is_completed_in_the_error(tmp_path: Path) -> None:
    checkpoint = distnb.Checkpoint(model=torch.nn.Linear(2, 1))
    paths = [checkpoint.save(tmp_path / "trained") for _ in range(2)]
    with pytest.raises(CheckpointError, match=f"`save` adds a number to the path: {re.escape(str(paths[-1]))} is"):
        checkpoint.restore(tmp_path / "trained")


def test_a_manager_keeps_the_newest_and_every_nth_checkpoint(tmp_path: Path) -> None:
    checkpoint = distnb.Checkpoint(value=torch.zeros(1))
    manager = distnb.CheckpointManager(checkpoint, tmp_path, max_to_keep=2, keep_every=3)
    assert manager.latest_checkpoint is None
    assert manager.restore_or_initialize() is None
    checkpoint.restore(manager.latest_checkpoint)  # does nothing, as in tf.train
    for _ in range(8):
        manager.save()
    assert [Path(each).name for each in manager.checkpoints] == ["ckpt-3", "ckpt-6", "ckpt-7", "ckpt-8"]
    assert sorted(os.listdir(tmp_path)) == [".ckpt.lock", "ckpt-3", "ckpt-6", "ckpt-7", "ckpt-8"]
    again = distnb.CheckpointManager(checkpoint, tmp_path, max_to_keep=None)
    assert again.checkpoints == manager.checkpoints
    assert Path(again.save()).name == "ckpt-9"
    assert Path(again.save(40)).name == "ckpt-40"
    assert Path(again.save()).name == "ckpt-41"
    with pytest.raises(OptionError, match="exists already"):
        again.save(40)
    assert distnb.latest_checkpoint(tmp_path) == again.latest_checkpoint == str(tmp_path / "ckpt-41")
    assert distnb.latest_checkpoint(tmp_path / "nowhere") is None
    assert Path(checkpoint.save(tmp_path / "mine")).name == "mine-1"
    assert Path(checkpoint.save(tmp_path / "mine")).name == "mine-2"


BAD: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: distnb.Checkpoint(),
    "a number": lambda _: distnb.Checkpoint(epoch=3),
    "a number in a list": lambda _: distnb.Checkpoint(all=[torch.ones(1), 3]),
    "a DataLoader": lambda _: distnb.Checkpoint(data=torch.utils.data.DataLoader(range(3))),
    "no checkpoint": lambda path: distnb.CheckpointManager(torch.nn.Linear(1, 1), path),  # type: ignore[arg-type]
    "keeps none": lambda path: distnb.CheckpointManager(distnb.Checkpoint(x=torch.ones(1)), path, max_to_keep=0),
    "a path as its name": lambda path: distnb.CheckpointManager(
        distnb.Checkpoint(x=torch.ones(1)), path, checkpoint_name="a/b"
    ),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
def test_bad_arguments_are_errors(tmp_path: Path, make: Callable[[Path], object]) -> None:
    with pytest.raises(OptionError):
        make(tmp_path)


def test_mismatched_objects_are_reported(tmp_path: Path) -> None:
    path = distnb.Checkpoint(model=torch.nn.Linear(2, 2), some=[torch.ones(2)]).write(tmp_path / "one")
    with pytest.raises(CheckpointError, match="does not hold optimizer: it holds model, some"):
        distnb.Checkpoint(optimizer=torch.optim.SGD([torch.ones(1)], lr=1.0)).restore(path)
    with pytest.raises(CheckpointError, match=r"weight has shape \[2, 2\] in the checkpoint and \[3, 2\] here"):
        distnb.Checkpoint(model=torch.nn.Linear(2, 3)).restore(path)
    with pytest.raises(CheckpointError, match=r"some\[0\] has shape \[2\] in the checkpoint and \[3\] here"):
        distnb.Checkpoint(some=[torch.ones(3)]).restore(path)
    with pytest.raises(CheckpointError, match="a list of 1, but the object is a list of 2"):
        distnb.Checkpoint(some=[torch.ones(2)] * 2).restore(path)
    with pytest.raises(CheckpointError, match="has a tensor, but the object is a module"):
        distnb.Checkpoint(some=[torch.nn.Linear(1, 1)]).restore(path)


class Layers(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Linear(2, 2))


def trained(cls: Any, model: torch.nn.Module, **options: Any) -> Any:
    optimizer = cls(model.parameters(), lr=0.1, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


class Stubborn:
    """An object that loads half of a state and then raises."""

    def __init__(self, number: int) -> None:
        self.number, self.other = number, 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]
        if self.number == 5:
            raise KeyError("other")


class Renaming(torch.nn.Linear):
    """An object that loads a state saved under another name."""

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel")
        super()._load_from_state_dict(state, prefix, *others)


def steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


SAVED: dict[str, Callable[[], Any]] = {
    "model": lambda: Layers("a", "b"),
    "narrower": lambda: torch.nn.Linear(2, 2, dtype=torch.complex64),
    "optimizer": lambda: trained(torch.optim.SGD, Layers("a"), momentum=0.9),
    "of_two": lambda: trained(torch.optim.SGD, Layers("a", "b"), momentum=0.9),
    "of_others": lambda: trained(torch.optim.Adam, torch.nn.Linear(2, 5)),
    "schedule": lambda: steps(trained(torch.optim.SGD, Layers("a"))),
    "variable": lambda: distnb.Variable(1.5),
    "table": lambda: distnb.Variable(torch.ones(3, 2)),
    "tensor": lambda: torch.ones(2),
    "named": lambda: {"one": torch.ones(1)},
    "stubborn": lambda: Stubborn(5),
    "renamed": lambda: torch.nn.Linear(2, 3),
    "mean": lambda: distnb.metrics.Mean(),
}

# name: (another object of that name, the error)
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "model": (lambda: Layers("a", "c"), r"c\.weight, c\.bias\.\n.*holds b\.weight, b\.bias, which Layers does not"),
    "narrower": (lambda: torch.nn.Linear(2, 2), "complex64 in the checkpoint and torch.float32 here"),
    "optimizer": (lambda: trained(torch.optim.Adam, Layers("a")), "momentum, dampening, nesterov; Adam has betas"),
    "of_two": (
        lambda: trained(torch.optim.SGD, Layers("a")),
        r"groups of \[4\] parameters, but the object has groups of \[2\]",
    ),
    "of_others": (
        lambda: trained(torch.optim.Adam, torch.nn.Linear(2, 4)),
        r"exp_avg of parameter 0 has shape \[5, 2\]",
    ),
    "schedule": (
        lambda: torch.optim.lr_scheduler.CosineAnnealingLR(trained(torch.optim.SGD, Layers("a")), 3),
        "another schedule, with step_size",
    ),
    "variable": (lambda: distnb.Variable(1), "float32 in the checkpoint and torch.int64 here"),
    "table": (lambda: distnb.Variable(torch.zeros(2, 2)), r"shape \[3, 2\]"),
    "tensor": (lambda: torch.nn.Linear(1, 1), "a tensor, but the object is a module"),
    "named": (lambda: {"two": torch.zeros(1)}, "does not hold two: it holds one"),
    "stubborn": (lambda: Stubborn(1), "KeyError: 'other'"),
    "mean": (lambda: distnb.metrics.Sum(), "has the states mean_value, weight, and Sum has sum_value"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_object_changes_if_one_does_not_fit(tmp_path: Path, name: str) -> None:
    path = distnb.Checkpoint(first=torch.ones(1), **{name: SAVED[name]()}, last=Stubborn(2)).write(tmp_path / "one")
    make, message = OTHERS[name]
    first, other, last = torch.zeros(1), make(), Stubborn(3)
    with pytest.raises(CheckpointError, match=message) as raised:
        distnb.Checkpoint(first=first, **{name: other}, last=last).restore(path)
    assert (first.item(), last.number) == (0.0, 3)
    assert "nothing was restored" in str(raised.value) or "nothing was changed" in str(raised.value)
    if name == "stubborn":
        assert other.number == 1
    if isinstance(other, torch.optim.Optimizer):
        other.step()


def test_objects_with_their_own_loading_are_restored(tmp_path: Path) -> None:
    path = distnb.Checkpoint(renamed=SAVED["renamed"](), lazy=torch.nn.Linear(2, 3)).write(tmp_path / "one")
    renamed, lazy = Renaming(2, 3), torch.nn.LazyLinear(3)
    distnb.Checkpoint(renamed=renamed, lazy=lazy).restore(path)
    assert lazy.weight.shape == (3, 2)
    # Another version of torch knows more options, or fewer.
    optimizer = trained(torch.optim.Adam, lazy)
    path = distnb.Checkpoint(optimizer=optimizer).write(tmp_path / "two")
    for group in optimizer.param_groups:
        del group["maximize"]
    path = distnb.Checkpoint(optimizer=optimizer).write(tmp_path / "older")
    again = trained(torch.optim.Adam, lazy)
    distnb.Checkpoint(optimizer=again).restore(path)
    again.step()


def test_a_metric_is_saved_and_restored(tmp_path: Path) -> None:
    import torchmetrics

    def made() -> dict[str, Any]:
        accuracy = torchmetrics.classification.MulticlassAccuracy
        return {
            "mean": distnb.metrics.Mean(),
            "cat": torchmetrics.CatMetric(),
            "both": torchmetrics.MetricCollection({"one": accuracy(3), "two": accuracy(3, top_k=2)}),
        }

    def update(metrics: dict[str, Any]) -> None:
        metrics["mean"].update(torch.tensor([1.0, 2.0]))
        metrics["cat"].update(torch.tensor([1.0, 2.0]))
        metrics["both"].update(torch.eye(3), torch.tensor([0, 2, 2]))

    saved, restored = made(), made()
    update(saved)
    path = distnb.Checkpoint(metrics=saved).write(tmp_path / "one")
    distnb.Checkpoint(metrics=restored).restore(path)
    for _ in range(2):
        assert same(
            {name: each.compute() for name, each in restored.items()}, {n: e.compute() for n, e in saved.items()}
        )
        update(saved)
        update(restored)


def test_the_status_lists_the_restored_objects(tmp_path: Path) -> None:
    saved = distnb.Checkpoint(step=torch.ones(1), more={"a": torch.ones(1), "b": torch.ones(1)})
    path = saved.write(tmp_path / "one")
    assert (
        saved.restore(path).assert_consumed().assert_existing_objects_matched().assert_nontrivial_match().unused == ()
    )
    status = distnb.Checkpoint(more={"a": torch.zeros(1)}).read(path)
    assert status.path == path
    assert status.expect_partial().unused == ("step", "more['b']")
    with pytest.raises(AssertionError, match=r"holds more than was restored: step, more\['b'\]"):
        status.assert_consumed()
    for check in ("assert_consumed", "assert_existing_objects_matched", "assert_nontrivial_match"):
        with pytest.raises(AssertionError, match="got None"):
            getattr(saved.restore(None).expect_partial(), check)()


def test_writes_restores_and_damaged_checkpoints_are_logged(tmp_path: Path) -> None:
    manager = distnb.CheckpointManager(distnb.Checkpoint(step=torch.ones(1)), tmp_path, max_to_keep=2)
    with TestCase().assertLogs("distnb.checkpoint", logging.INFO) as logged:
        for _ in range(3):
            manager.save()
        (tensors,) = (tmp_path / "ckpt-3").glob("*.safetensors")
        nbytes = tensors.stat().st_size
        tensors.write_bytes(b"\0" * nbytes)
        with pytest.warns(UserWarning, match="ckpt-3 is damaged"):
            manager.restore_or_initialize()
    manager.close()
    assert [record.getMessage().split(": the header")[0] for record in logged.records] == [
        *(f"wrote {tmp_path}/ckpt-{number}: {nbytes} bytes in 1 files" for number in (1, 2, 3)),
        f"deleted {tmp_path}/ckpt-1",
        f"{tmp_path}/ckpt-3 is not used: {tmp_path}/ckpt-3 is damaged",
        f"restored {tmp_path}/ckpt-2; 0 names in it have no object",
    ]


def test_a_thread_writes_the_state_at_the_time_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, value = threading.Event(), torch.ones(4)
    write = files.write

    def slowly(*arguments: Any) -> None:
        assert go.wait(60)
        write(*arguments)

    monkeypatch.setattr(files, "write", slowly)
    checkpoint = distnb.Checkpoint(value=value)
    path = checkpoint.write(tmp_path / "one", wait=False)
    assert not os.path.exists(path)
    value.zero_()
    go.set()
    checkpoint.wait()
    checkpoint.restore(path)
    assert value.tolist() == [1, 1, 1, 1]


def test_an_error_of_the_thread_is_raised_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    checkpoint = distnb.Checkpoint(value=torch.ones(1))
    with monkeypatch.context() as patched:
        patched.setattr("safetensors.torch.save_file", full)
        checkpoint.write(tmp_path / "one", wait=False)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.wait()
    assert os.listdir(tmp_path) == []
    checkpoint.write(tmp_path / "one")


# -- killed while it saves -----------------------------------------------------------------------------------------------

SAVES = 3


def saves(folder: Path, kill_at: int) -> int:
    """Save repeatedly, be killed at one line of the writing code, and return the number of lines."""
    value = torch.zeros(1000)
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != files.__file__:
            return None
        lines += event == "line"
        if lines == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    manager = distnb.CheckpointManager(distnb.Checkpoint(value=value), folder, max_to_keep=1)
    manager.save()
    sys.settrace(trace)
    try:
        for number in range(2, SAVES + 1):
            value.fill_(number)
            manager.save()
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_complete_checkpoint_exists_after_a_kill_at_any_point(tmp_path: Path) -> None:
    lines = saves(tmp_path / "whole", kill_at=-1)
    found = set()
    for kill_at in range(1, lines, max(1, lines // 40)):
        folder = tmp_path / str(kill_at)
        child = os.fork()
        if child == 0:
            os.environ.pop("PYTEST_CURRENT_TEST", None)
            saves(folder, kill_at)
            os._exit(3)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status
        assert os.WTERMSIG(status) == signal.SIGKILL
        value = torch.full((1000,), -1.0)
        manager = distnb.CheckpointManager(distnb.Checkpoint(value=value), folder, max_to_keep=1)
        path = manager.restore_or_initialize()
        assert path is not None
        number = int(path.rpartition("-")[2])
        assert value.tolist() == [0.0 if number == 1 else float(number)] * 1000
        assert all(each.startswith("ckpt-") for each in os.listdir(folder)), "its leftovers are removed"
        manager.save()
        folder_locks.release_kept()  # as at a program's end
        assert os.listdir(folder) == [f"ckpt-{number + 1}"]
        found.add(number)
    assert found == set(range(1, SAVES + 1))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_second_program_cannot_save_into_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_locks, "_PATIENCE_S", 0.1)
    checkpoint = distnb.Checkpoint(value=torch.ones(1))

    def forever(path: Path, tree: Any) -> None:
        (path.parent / ".ckpt-2.unfinished-01234567").mkdir()
        signal.pause()

    child = os.fork()
    if child == 0:
        other = distnb.CheckpointManager(checkpoint, tmp_path)
        other.save()
        files.write = forever
        other.save()
        os._exit(3)
    try:
        wait_until(lambda: (tmp_path / ".ckpt-2.unfinished-01234567").exists(), 30.0)
        manager = distnb.CheckpointManager(checkpoint, tmp_path)
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1"), "reading is not blocked"
        for save in (
            manager.save,
            lambda: checkpoint.save(tmp_path / "ckpt"),
            lambda: checkpoint.write(tmp_path / "ckpt"),
        ):
            with pytest.raises(CheckpointError, match=rf"Another program saves checkpoints 'ckpt'.*process {child} on"):
                save()
        checkpoint.write(tmp_path / "other")
        assert (tmp_path / ".ckpt-2.unfinished-01234567").exists(), "it is being written"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert Path(distnb.CheckpointManager(checkpoint, tmp_path).save()).name == "ckpt-2"
    assert sorted(os.listdir(tmp_path)) == [".ckpt.lock", "ckpt-1", "ckpt-2", "other"]
    manager.close()
    assert sorted(os.listdir(tmp_path)) == ["ckpt-1", "ckpt-2", "other"]


def test_checkpoints_saved_meanwhile_by_another_program_are_counted(tmp_path: Path) -> None:
    """Count a checkpoint that another program's thread still writes when a manager is made."""
    objects = distnb.Checkpoint(value=torch.ones(1))
    early, late = (distnb.CheckpointManager(objects, tmp_path / "both") for _ in range(2))
    assert late.save().endswith("ckpt-1")
    folder_locks.release_kept()
    assert [early.save()[-6:], early.save()[-6:]] == ["ckpt-2", "ckpt-3"]


def test_a_thread_that_is_writing_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), files.write_part

    def slowly(*arguments: Any) -> Any:
        assert go.wait(60)
        return write(*arguments)

    monkeypatch.setattr(files, "write_part", slowly)
    checkpoint = distnb.Checkpoint(value=torch.ones(1))
    first = distnb.CheckpointManager(checkpoint, tmp_path)
    path = first.save(wait=False)
    folder_locks.release_kept()  # the cell has ended, and the thread still writes
    wait_until(lambda: any("unfinished" in each for each in os.listdir(tmp_path)), 30.0)
    distnb.CheckpointManager(checkpoint, tmp_path)
    go.set()
    first.wait()
    assert os.listdir(tmp_path) == [os.path.basename(path)]


def test_the_manifest_is_plain_text(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    path = Path(distnb.Checkpoint(model=model).write(tmp_path / "one"))
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert manifest["holds"]["tree"]["model"]["weight"] == {"$": "tensor", "name": "model/weight"}

"""`distnb.load_safetensors`: a model's parameters from safetensors files, straight into shards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from distnb.checkpoint.exporting import INDEX, SINGLE
from distnb.checkpoint.states.base import TensorOutline, listed, misfit_of_tensor
from distnb.checkpoint.states.module_states import load_tensors, loads_itself, tensors_of
from distnb.checkpoint.states.object_states import on_replicas
from distnb.checkpoint.stored_tensors import StoredTensor
from distnb.checkpoint.tensor_files import map_tensors
from distnb.errors import CheckpointError, CheckpointMismatchError, ContextError, OptionError
from distnb.runtime import contexts
from distnb.runtime.chief_work.together import gather_lines, raise_together
from distnb.values import Mirrored

__all__ = ["LoadedNames", "load_safetensors"]


class LoadedNames(NamedTuple):
    """The differences between a model and the files that it was loaded from.

    Attributes:
        missing: Names of the model that are not in the files. They keep their values.
        unexpected: Names in the files that the model does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_safetensors(
    model: torch.nn.Module | Mirrored, path: str | os.PathLike[str], *, strict: bool = True
) -> LoadedNames:
    """Load a model's parameters and buffers from safetensors files, under any strategy.

    Each replica reads the files itself, and of a sharded parameter only its own part. Parameters on the meta device
    get memory, so a model need not fit on one device at any time. Tensors are converted to the parameters' dtypes. A
    tied parameter needs one of its names in the files. If names or shapes do not match, nothing is changed.

    All replicas call this, in cross-replica context. The path must lead to the same files on all machines. For a
    handle in the notebook, the replicas read the files.

    Args:
        model: The model. Under a strategy that shards, call this after the scope, when it is sharded.
        path: A safetensors file, an index (`model.safetensors.index.json`), or a folder with one of them, as
            `export_safetensors` and transformers' `save_pretrained` write it.
        strict: With False, names may be missing in the files or in the model. Shapes must match in any case.

    Returns:
        The missing and the unexpected names.

    Raises:
        CheckpointMismatchError: Names or shapes differ; the error lists them.
        CheckpointError: A file is missing, incomplete or not a safetensors file.
        OptionError: The model is not a module.
        ContextError: In a replica context.

    Example:
        >>> import distnb, tempfile, torch
        >>> model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     names = distnb.load_safetensors(other, distnb.export_safetensors(model, folder))
        >>> torch.equal(model.weight, other.weight)
        True
    """
    source = os.path.abspath(path)
    if isinstance(model, Mirrored):
        return LoadedNames(*map(tuple, on_replicas(_load, model, source, strict)))
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"load_safetensors takes a module and got a {type(model).__name__}.")
    if contexts.in_replica():
        raise ContextError("load_safetensors was called in a replica context. Call it before strategy.run.")
    return LoadedNames(*map(tuple, _load(model, source, strict)))


def _load(model: torch.nn.Module, source: str, strict: bool) -> tuple[list[str], list[str]]:
    stored: dict[str, StoredTensor] = {}
    error: Exception | None = None
    try:
        stored = _stored_tensors(Path(source))
    except (CheckpointError, OSError) as raised:
        error = raised if isinstance(raised, CheckpointError) else CheckpointError(f"{source}: {raised}")
    raise_together(error)
    if loads_itself(model):  # its own code knows the names
        found = load_tensors(model, stored, own_loading=True, strict=strict)
        return list(found.missing_keys), list(found.unexpected_keys)
    own = {name: each for name, each in tensors_of(model).items() if isinstance(each, torch.Tensor)}
    by_identity = {id(own[name]): name for name in stored if name in own}  # a name for each tied parameter
    found_in = {name: name if name in stored else by_identity.get(id(each)) for name, each in own.items()}
    state = {name: stored[there] for name, there in found_in.items() if there is not None}
    missing, unexpected = [name for name in own if name not in state], [name for name in stored if name not in own]
    lines = [f"The files do not hold {listed(missing)}."] if strict and missing else []
    lines += [f"{type(model).__name__} does not have {listed(unexpected)}."] if strict and unexpected else []
    for name, each in state.items():
        misfit = None if is_lazy(own[name]) else misfit_of_tensor(own[name], TensorOutline(each.shape, each.dtype))
        lines += [f"{name} {misfit.replace('in the checkpoint', 'in the files')}."] if misfit else []
    lines = gather_lines(lines)
    if lines:
        raise CheckpointMismatchError(
            f"{source} does not match the model, and nothing was loaded.\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nMake the model as it was when it was saved, or load what matches with strict=False."
        )
    load_tensors(model, state, strict=False)
    return missing, unexpected


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a path leads to. Only the headers of the files are read."""
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix != ".json":
        return _of_file(path)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {path}.") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is not an index of safetensors files.") from None
    files = {file: _of_file(path.parent / file) for file in sorted(set(index.values()))}
    for name, file in index.items():
        if name not in files[file]:
            raise CheckpointError(f"{path} names {name!r} in {file}, which does not hold it.")
    return {name: files[file][name] for name, file in index.items()}


def _in_folder(folder: Path) -> Path:
    """Return the index or the only safetensors file of a folder."""
    if (folder / "checkpoint.json").exists():
        raise CheckpointError(f"{folder} is a checkpoint of distnb. Restore it with distnb.Checkpoint(…).restore.")
    for name in (INDEX, SINGLE):
        if (folder / name).exists():
            return folder / name
    found = sorted([*folder.glob("*.safetensors.index.json")] or [*folder.glob("*.safetensors")])
    if len(found) != 1:
        what = f"holds {listed(each.name for each in found)}" if found else "holds no safetensors file"
        raise CheckpointError(f"{folder} {what}. Give the path of one file, or of the index of several.")
    return found[0]


def _of_file(file: Path) -> dict[str, StoredTensor]:
    return {name: StoredTensor(name, [((0,) * each.dim(), each)]) for name, each in map_tensors(file)[0].items()}

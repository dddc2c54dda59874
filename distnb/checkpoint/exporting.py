"""`distnb.export_safetensors`: a model as safetensors files, which other libraries load."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from distnb.checkpoint.states.module_states import tensors_of
from distnb.checkpoint.states.object_states import on_replicas
from distnb.checkpoint.tensor_files import DTYPES, write_tensors
from distnb.checkpoint.tensor_slices import is_sharded
from distnb.errors import ContextError, OptionError
from distnb.runtime import contexts
from distnb.runtime.chief_work.together import on_chief
from distnb.runtime.this_process import this_process
from distnb.values import Mirrored

__all__ = ["INDEX", "SINGLE", "export_safetensors"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_UNFINISHED = ".unfinished"

_Outline = tuple[torch.dtype, tuple[int, ...]]


def export_safetensors(
    model: torch.nn.Module | Mirrored, folder: str | os.PathLike[str], *, max_file_nbytes: int = 5_000_000_000
) -> str:
    """Write a model's parameters and buffers as safetensors files, under any strategy.

    The folder gets `model.safetensors`. A larger model gets `model-00001-of-00002.safetensors` and so on, and
    `model.safetensors.index.json`. Names, shapes and dtypes are those of `model.state_dict()`. A tied parameter is
    written once, under its first name. transformers' `from_pretrained` loads the folder if the model's configuration
    is in it, too.

    All replicas call this, in cross-replica context. They gather sharded parameters one after the other, and replica 0
    writes. It holds the whole parameters of one file, the others only one whole parameter at a time. A handle in the
    notebook is exported by its replicas.

    Args:
        model: The model.
        folder: The folder. It is made if it does not exist.
        max_file_nbytes: The size of a file above which the next tensor goes to another file.

    Returns:
        The path of the folder.

    Raises:
        OptionError: The folder has an exported model already, or the model has a state that safetensors cannot hold.
        ContextError: In a replica context.
        OSError: The file system's error, on every replica.

    Example:
        >>> import distnb, tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = distnb.export_safetensors(model, folder)
        ...     sorted(os.listdir(folder))
        ['model.safetensors']
    """
    if type(max_file_nbytes) is not int or max_file_nbytes < 1:
        raise OptionError(f"max_file_nbytes={max_file_nbytes!r}: give a positive number of bytes.")
    target = Path(os.path.abspath(folder))
    if isinstance(model, Mirrored):
        return str(on_replicas(_export, model, str(target), max_file_nbytes))
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"export_safetensors takes a module and got a {type(model).__name__}.")
    if contexts.in_replica():
        raise ContextError("export_safetensors was called in a replica context. Call it after strategy.run.")
    return _export(model, str(target), max_file_nbytes)


def _export(model: torch.nn.Module, folder: str, max_file_nbytes: int) -> str:
    tensors = _checked(_without_tied(model))
    outlines = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    files = _divided(outlines, max_file_nbytes)
    target = Path(folder)
    on_chief(lambda: _check_free(target))
    process = this_process.replica
    writer = _ModelWriter(target) if process is None or process.rank == 0 else None
    for file, names in files.items():
        wholes = {}
        for name in names:
            each = _whole_value(tensors[name])  # on all replicas, also if replica 0 cannot write
            if writer is not None:
                wholes[name] = each.cpu()
            del each
        if writer is not None:
            writer.write(file, wholes)
    on_chief(lambda: writer.finish(files, sum(map(_nbytes, outlines.values()))) if writer is not None else None)
    return folder


def _without_tied(model: torch.nn.Module) -> dict[str, Any]:
    """Return the state of a model, with each tied tensor under its first name."""
    identities = {name: id(each) for name, each in tensors_of(model).items()}
    seen: set[int] = set()
    found = {}
    for name, each in model.state_dict().items():
        identity = identities.get(name)
        if identity is None or identity not in seen:
            found[name] = each
        if identity is not None:
            seen.add(identity)
    return found


def _checked(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    for name, each in tensors.items():
        if not isinstance(each, torch.Tensor):
            what = f"a {type(each).__name__}"
        elif each.is_meta:
            what = "on the meta device and has no content"
        elif each.layout is not torch.strided or each.dtype not in DTYPES:
            what = f"a {each.layout} tensor of {each.dtype}"
        else:
            continue
        raise OptionError(
            f"safetensors files cannot hold {name!r}: it is {what}. Save the model with distnb.Checkpoint, or export a "
            "part of it."
        )
    return tensors


def _nbytes(outline: _Outline) -> int:
    dtype, shape = outline
    return math.prod(shape) * dtype.itemsize


def _divided(outlines: Mapping[str, _Outline], max_file_nbytes: int) -> dict[str, list[str]]:
    """Return the names of the tensors in each file."""
    groups: list[list[str]] = [[]]
    room = max_file_nbytes
    for name, outline in outlines.items():
        if groups[-1] and _nbytes(outline) > room:
            groups.append([])
            room = max_file_nbytes
        groups[-1].append(name)
        room -= _nbytes(outline)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{number:05}-of-{count:05}.safetensors": names for number, names in enumerate(groups, 1)}


def _check_free(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = [*folder.glob("model.safetensors*"), *folder.glob("model-*-of-*.safetensors")]
    if found:
        raise OptionError(
            f"{folder} holds {found[0].name} already. Export into another folder, so that files of two models are not "
            "mixed."
        )


def _whole_value(tensor: Any) -> torch.Tensor:
    """Return a tensor in host memory. All replicas gather a sharded one."""
    whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole.detach()


class _ModelWriter:
    """The files on replica 0. An error is raised at the end, because the other replicas gather until then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._error: OSError | OptionError | None = None

    def _unfinished(self, file: str) -> Path:
        return self._folder / f".{file}{_UNFINISHED}"

    def write(self, file: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a file under a temporary name."""
        if self._error is not None:
            return
        try:
            write_tensors(self._unfinished(file), tensors, {"format": "pt"})
        except (OSError, OptionError) as error:
            self._error = error

    def finish(self, files: Mapping[str, Iterable[str]], nbytes: int) -> None:
        """Give the files their names and write the index, or delete them and raise the first error."""
        if self._error is not None:
            for file in files:
                self._unfinished(file).unlink(missing_ok=True)
            raise self._error
        for file in files:
            self._unfinished(file).rename(self._folder / file)
        if len(files) > 1:
            index = {
                "metadata": {"total_size": nbytes},
                "weight_map": {name: file for file, names in files.items() for name in names},
            }
            (self._folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

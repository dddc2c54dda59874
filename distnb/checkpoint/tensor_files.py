"""A safetensors file: its tensors are written together, and mapped into memory, where they are read when they are used.

The safetensors library does both. This module names files in its errors, and prepares tensors that it refuses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from distnb.errors import CheckpointError, OptionError

__all__ = ["DTYPES", "map_tensors", "naming", "sync", "write_tensors"]

DTYPES: Final = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    }
)
"""The dtypes that files can hold."""


def map_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a file, sorted by name, and its metadata.

    The tensors are in the memory of the mapped file, of which only those pages are read that are used. Copy a tensor to
    keep it.

    Raises:
        CheckpointError: There is no such file, or it is not a safetensors file, or it is not complete.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with _default_device_is_cpu(), safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in sorted(opened.keys())}, opened.metadata() or {}
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {file}.") from None
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a safetensors file, or it is not complete: {error}.") from None


def _default_device_is_cpu() -> AbstractContextManager[Any]:
    """Have the library make tensors on the CPU, not on torch's default device. The mode slows down every call."""
    device = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == device else device


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, torch.Tensor]:
    """Write tensors to a file on the disk. Return them as they were written, in host memory.

    Raises:
        OptionError: The installed library lacks a dtype.
        OSError: The file system's error, with the path.
    """
    from safetensors.torch import save_file

    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        here = tensor.cpu()  # copied first: not every device reports the address of its memory
        storage = here.untyped_storage()
        # safetensors refuses tensors that share memory.
        is_whole = here.is_contiguous() and storage.nbytes() == here.nbytes and storage.data_ptr() not in seen
        plain[name] = here if is_whole else here.clone(memory_format=torch.contiguous_format)
        seen.add(storage.data_ptr())
    with naming(file):
        try:
            save_file(plain, file, metadata=metadata)
        except KeyError as error:
            raise OptionError(
                f"The installed safetensors has no {error.args[0]}. Install a newer safetensors."
            ) from None
        sync(file)
    return plain


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the path to errors of the file system that have none, such as of a full disk."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(file)) from None
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from None


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

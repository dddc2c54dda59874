"""The files of a checkpoint: a folder of safetensors files and one JSON file that describes them.

The folder is made under a temporary name, and renamed when all of it is on the disk. If a process is killed while it
writes, the earlier checkpoints remain intact. torch.distributed.checkpoint can read the tensors, too: each file
holds slices of them.

If tensors are sharded, each replica writes one file with its slices, and replica 0 also all that is not sharded:

    .ckpt-7.unfinished-1a2b3c4d/      then: ckpt-7/
        00001-of-00002.safetensors          "model/weight"[0:2], "model/bias", "optimizer/state/0/step"
        00002-of-00002.safetensors          "model/weight"[2:4]
        checkpoint.json                     the sizes and digests of both, and the tree; written last
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash

from distnb.checkpoint.stored_tensors import StoredTensor
from distnb.checkpoint.tensor_files import map_tensors, naming, sync, write_tensors
from distnb.checkpoint.tensor_slices import TensorSlice
from distnb.checkpoint.trees import decode, encode
from distnb.errors import CheckpointError, OptionError

__all__ = [
    "Held",
    "begin",
    "check",
    "check_free",
    "complete",
    "complete_from_notes",
    "discard",
    "held_here",
    "is_complete",
    "leave_note",
    "missing_parts",
    "name_of_part",
    "numbered",
    "read",
    "remove",
    "remove_unfinished",
    "stored",
    "write",
    "write_part",
]

_logger = logging.getLogger("distnb.checkpoint")

_MANIFEST = "checkpoint.json"
_FORMAT = "distnb checkpoint"
# Version 2 has slices that are not cut along the first axis alone.
_VERSION, _ANY_AXIS = 1, 2
_UNFINISHED, _REMOVED, _NOTE = ".unfinished-", ".removed-", ".note"
# The keys in files that torch.distributed.checkpoint reads.
_SLICES, _BEGINNING = "DCP_SHARDING_INFO", "saved_offsets"

_LONGEST_HEADER = 100_000_000  # the limit of the safetensors library

Held = dict[str, tuple[torch.Tensor, list[int]]]
"""The tensors of one file by name, each with its place in the whole."""


def check_free(path: Path) -> None:
    """Raise OptionError if the path exists."""
    if os.path.lexists(path):
        raise OptionError(
            f"{path} exists already, and a checkpoint never replaces another. Choose another name, or use a "
            "CheckpointManager, which numbers them and deletes the old ones."
        )


def write(path: Path, tree: Any) -> None:
    """Write a tree as a checkpoint.

    Args:
        path: The folder to make. It must not exist.
        tree: A tree for `encode`. This process holds all of its slices.

    Raises:
        OptionError: The path exists, or the tree contains something that a checkpoint cannot hold.
        OSError: The file system's error. There is no checkpoint of that name then.
    """
    check_free(path)
    described, tensors = encode(tree)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = begin(path)
    try:
        name = name_of_part(1, 1)
        complete(unfinished, path, {name: write_part(unfinished / name, held_here(tensors, chief=True))}, described)
    except BaseException:
        discard(unfinished)
        raise


def begin(path: Path) -> Path:
    """Make the folder in which a checkpoint is written, and return its path."""
    unfinished = path.with_name(f".{path.name}{_UNFINISHED}{secrets.token_hex(4)}")
    unfinished.mkdir()
    return unfinished


def discard(unfinished: Path) -> None:
    """Delete a checkpoint that cannot be completed."""
    shutil.rmtree(unfinished, ignore_errors=True)


def name_of_part(number: int, count: int) -> str:
    """Return the name of a part's file. The first part has the number 1."""
    return f"{number:05}-of-{count:05}.safetensors"


def held_here(tensors: Mapping[str, torch.Tensor | TensorSlice], *, chief: bool) -> Held:
    """Return the tensors that this replica writes: its slices, and on the chief also everything that is not sharded."""
    held: Held = {}
    for name, each in tensors.items():
        if isinstance(each, TensorSlice):
            if each.is_owned:
                held[name] = each.local.detach(), list(each.offset)
        elif chief:
            held[name] = each, [0] * each.dim()
    return held


def write_part(file: Path, held: Held) -> dict[str, Any]:
    """Write one file to the disk.

    Returns:
        The file's size, a digest of its header, and for each slice its start, its dtype, and a digest of its bytes.
    """
    beginnings = {name: {_BEGINNING: offset} for name, (_, offset) in held.items()}
    plain = write_tensors(file, {name: tensor for name, (tensor, _) in held.items()}, {_SLICES: json.dumps(beginnings)})
    return {
        "nbytes": file.stat().st_size,
        "header": _digest_of_header(file),
        "tensors": {
            name: (_start(held[name][1]), str(each.dtype).removeprefix("torch."), _digest(each))
            for name, each in plain.items()
        },
    }


def _start(offset: list[int]) -> int | list[int]:
    """Return the place of a slice: a number if it is cut along the first axis alone."""
    return offset if any(offset[1:]) else next(iter(offset), 0)


def complete(unfinished: Path, path: Path, parts: Mapping[str, Any], described: Any) -> None:
    """Write the description of a checkpoint whose parts are on the disk, and give it its name.

    Args:
        unfinished: The folder with the parts.
        path: The checkpoint.
        parts: The result of `write_part` for each file.
        described: The tree, from `encode`.

    Raises:
        FileExistsError: Another process completes the checkpoint.
    """
    held = {"files": dict(sorted(parts.items())), "tree": described}
    starts = [start for facts in parts.values() for start, _, _ in facts["tensors"].values()]
    version = _ANY_AXIS if any(isinstance(start, list) for start in starts) else _VERSION
    manifest = {"format": _FORMAT, "version": version, "xxh3_128": _digest_of_text(held), "holds": held}
    with naming(unfinished / _MANIFEST), (unfinished / _MANIFEST).open("x", encoding="utf-8") as text:
        json.dump(manifest, text, allow_nan=False)
        text.flush()
        os.fsync(text.fileno())
    for note in unfinished.glob(f"*{_NOTE}"):
        note.unlink()
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)
    nbytes = sum(facts["nbytes"] for facts in parts.values())
    _logger.info("wrote %s: %d bytes in %d files", path, nbytes, len(parts))


# -- written by several replicas in the background ---------------------------------------------------------------------


def leave_note(unfinished: Path, name: str, facts: Any, described: Any = None) -> None:
    """Note that a part is on the disk, for the replica that completes the checkpoint.

    Args:
        unfinished: The folder with the parts.
        name: The name of the part.
        facts: The result of `write_part`.
        described: The tree, from the chief.
    """
    written = unfinished / f".{name}{_NOTE}"
    written.write_text(json.dumps({"facts": facts, "tree": described}, allow_nan=False), encoding="utf-8")
    written.rename(unfinished / f"{name}{_NOTE}")


def missing_parts(unfinished: Path, count: int) -> list[str]:
    """Return the names of the parts that are not on the disk yet."""
    names = [name_of_part(number, count) for number in range(1, count + 1)]
    return [name for name in names if not (unfinished / f"{name}{_NOTE}").exists()]


def complete_from_notes(unfinished: Path, path: Path, count: int) -> bool:
    """Complete a checkpoint if all parts are on the disk and no other replica does. Return whether this one did."""
    if missing_parts(unfinished, count):
        return False
    with suppress(FileNotFoundError, FileExistsError):  # another replica was faster
        names = [name_of_part(number, count) for number in range(1, count + 1)]
        notes = {name: json.loads((unfinished / f"{name}{_NOTE}").read_text(encoding="utf-8")) for name in names}
        complete(unfinished, path, {name: each["facts"] for name, each in notes.items()}, notes[names[0]]["tree"])
        return True
    return False


# -- on the disk -------------------------------------------------------------------------------------------------------


def _digest_of_text(held: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(held, allow_nan=False).encode())


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return xxhash.xxh3_128_hexdigest(data)


def _digest_of_header(file: Path) -> str:
    """Return a digest of what a file says about its tensors: eight bytes with the length of a text, and the text."""
    with file.open("rb") as opened:
        length = opened.read(8)
        return xxhash.xxh3_128_hexdigest(length + opened.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER)))


# -- reading -----------------------------------------------------------------------------------------------------------


def check(path: Path) -> dict[str, Any]:
    """Return a checkpoint's description ("files" and "tree"), if its files exist and have their full length.

    Raises:
        CheckpointError: The path is not a checkpoint, or the checkpoint is incomplete.
    """
    try:
        manifest = json.loads(_text_of(path / _MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        what = "there is no such file or folder" if not path.exists() else f"it has no {_MANIFEST}"
        raise CheckpointError(f"{path} is not a checkpoint of distnb: {what}.") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is not a checkpoint of distnb: {_MANIFEST} is not a file.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not complete: {_MANIFEST} is not JSON ({error}).") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of distnb: {_MANIFEST} has another format.")
    if manifest.get("version") not in (_VERSION, _ANY_AXIS):
        raise CheckpointError(
            f"{path} is a checkpoint of version {manifest.get('version')!r}, but this distnb reads {_VERSION} and "
            f"{_ANY_AXIS}. Install a newer distnb."
        )
    holds: dict[str, Any] = manifest.get("holds", {})
    if _digest_of_text(holds) != manifest.get("xxh3_128") or not {"files", "tree"} <= {*holds}:
        raise CheckpointError(f"{path} is damaged: {_MANIFEST} has changed since it was written.")
    for name, facts in holds["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else 0
        if found != facts["nbytes"]:
            raise CheckpointError(f"{path} is not complete: {name} has {found} bytes instead of {facts['nbytes']}.")
    return holds


def _text_of(file: Path) -> str:
    """Return the text of a file. Raise IsADirectoryError if it is anything else, such as a pipe, which would block."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        with open(descriptor, encoding="utf-8", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)


def read(path: Path) -> Any:
    """Return the tree of a checkpoint. Its tensors are in the mapped files: copy those that you keep.

    Raises:
        CheckpointError: The path is not a checkpoint, or the checkpoint is incomplete or damaged.
    """
    described, tensors = _open(path, 0, 1)
    return decode(described, {name: each.map() for name, each in tensors.items()})


def stored(path: Path, share: int = 0, shares: int = 1) -> Any:
    """Return the tree of a checkpoint with a `StoredTensor` for each tensor. All replicas call this together.

    Each replica compares the digests of a share of the bytes. Together they check the whole checkpoint.

    Args:
        path: The checkpoint.
        share: The number of this replica's share.
        shares: The number of shares.

    Raises:
        CheckpointError: The path is not a checkpoint, or the checkpoint is incomplete or damaged.
    """
    return decode(*_open(path, share, shares))


def _open(path: Path, share: int, shares: int) -> tuple[Any, dict[str, StoredTensor]]:
    holds = check(path)
    parts: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    total = sum(facts["nbytes"] for facts in holds["files"].values())
    before = 0
    for name, facts in holds["files"].items():
        if _digest_of_header(path / name) != facts["header"]:
            raise CheckpointError(f"{path} is damaged: the header of {name} has changed since it was written.")
        tensors, metadata = map_tensors(path / name)
        beginnings = json.loads(metadata[_SLICES])
        for key, tensor in tensors.items():
            if before * shares // total == share and _digest(tensor) != facts["tensors"][key][2]:
                raise CheckpointError(
                    f"{path} is damaged: the bytes of {key!r} in {name} have changed since they were written."
                )
            parts.setdefault(key, []).append((beginnings[key][_BEGINNING], tensor))
            before += tensor.nbytes
    return holds["tree"], {key: StoredTensor(key, several) for key, several in parts.items()}


# -- many of them in one folder ----------------------------------------------------------------------------------------


def numbered(folder: Path, name: str) -> dict[int, Path]:
    """Return all entries `name-1`, `name-2`… of a folder by number, the lowest first, also those that are damaged."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    entries = folder.iterdir() if folder.is_dir() else ()
    found = {int(matched[1]): each for each in entries if (matched := pattern.fullmatch(each.name))}
    return dict(sorted(found.items()))


def is_complete(path: Path) -> bool:
    """Return whether a checkpoint's files exist and have their full length."""
    try:
        check(path)
    except (CheckpointError, OSError):
        return False
    return True


def remove(path: Path) -> None:
    """Delete a checkpoint, if it exists. It is renamed first, so that a partial one never appears under its name."""
    if not path.exists():
        return
    doomed = path.with_name(f".{path.name}{_REMOVED}{secrets.token_hex(4)}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    _logger.info("deleted %s", path)


def remove_unfinished(folder: Path, name: str) -> None:
    """Delete the remains of processes that were killed while they wrote or deleted `name-1`, `name-2`…"""
    pattern = re.compile(rf"\.{re.escape(name)}-\d+({re.escape(_UNFINISHED)}|{re.escape(_REMOVED)})[0-9a-f]{{8}}")
    for each in folder.iterdir() if folder.is_dir() else ():
        if pattern.fullmatch(each.name):
            shutil.rmtree(each, ignore_errors=True)
            _logger.info("deleted the unfinished %s", each)

"""Recordings of torch.profiler on replicas, written as files next to the notebook."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distnb.errors import OptionError
from distnb.views.wording import human_bytes

__all__ = ["profile_folder", "write_profiles"]


def profile_folder(name: str) -> Path:
    """Return the folder for profiles, created if it does not exist. Raises OptionError if that fails."""
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"--profile {name}: the folder cannot be created ({error.strerror}). Give a folder that you can write to."
        ) from None
    return folder


def write_profiles(folder: Path, profiles: Mapping[int, Any]) -> None:
    """Write the traces of the replicas that have one, and print the files' paths."""
    for replica, trace in sorted(item for item in profiles.items() if item[1] is not None):
        path = folder / f"replica_{replica}.pt.trace.json.gz"
        path.write_bytes(trace)
        print(f"Profile of replica {replica}: {path} ({human_bytes(path.stat().st_size)})")

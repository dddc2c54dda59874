"""The messages that bring the files of the notebook's folders to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distnb.machines.users_code.received_files import received_files
from distnb.wire.messages import EngineTask

__all__ = ["FilesWritten", "WriteFiles"]


@dataclass(frozen=True)
class FilesWritten:
    """The engine has the files whose digest is `digest`, or could not write them for the reason `error`."""

    engine: int
    digest: bytes
    error: str = ""


@dataclass(frozen=True)
class WriteFiles(EngineTask):
    """Order to write files.

    Attributes:
        folders: The paths of the folders on the notebook's machine.
        files: The contents by place (see `FolderFiles`); None for a file that no longer exists.
        digest: The digest of all files that the engine has afterwards.
        whole: Whether the message has all files, so that the engine removes any other that it has.
    """

    folders: tuple[str, ...]
    files: Mapping[str, bytes | None]
    digest: bytes
    whole: bool

    def carry_out(self, engine: int, directory: Path) -> FilesWritten:
        """Write the files. Modules that are loaded stay until they are reloaded."""
        try:
            received_files.write(directory / f"folders-{engine}", self.folders, self.files, whole=self.whole)
        except OSError as error:
            return FilesWritten(engine, self.digest, str(error))
        return FilesWritten(engine, self.digest)

"""The result of restoring a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from distnb.errors import CheckpointMismatchError

__all__ = ["RestoreStatus"]


@dataclass(frozen=True)
class RestoreStatus:
    """The result of `Checkpoint.restore`, with TensorFlow's assertions.

    `restore` itself raises if an object has no state in the checkpoint, so no restoration is deferred.

    Attributes:
        path: The checkpoint that was restored; None if there was none.
        unused: Names in the checkpoint without an object.
    """

    path: str | None
    unused: tuple[str, ...] = ()

    def assert_consumed(self) -> RestoreStatus:
        """Raise a CheckpointMismatchError unless the whole checkpoint was restored."""
        self._require_path()
        if self.unused:
            raise CheckpointMismatchError(
                f"{self.path} holds more than was restored: {', '.join(self.unused)}. Name these objects in the "
                "Checkpoint, too, or call expect_partial() instead of assert_consumed()."
            )
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Raise a CheckpointMismatchError if there was no checkpoint. Objects without a state raise in `restore`."""
        self._require_path()
        return self

    def assert_nontrivial_match(self) -> RestoreStatus:
        """Raise a CheckpointMismatchError if there was no checkpoint. A Checkpoint holds at least one object."""
        self._require_path()
        return self

    def expect_partial(self) -> RestoreStatus:
        """Return the status. distnb never warns about unused states, so there is nothing to silence."""
        return self

    def _require_path(self) -> None:
        if self.path is None:
            raise CheckpointMismatchError(
                "Nothing was restored: restore() got None, the value of `latest_checkpoint` without a checkpoint."
            )

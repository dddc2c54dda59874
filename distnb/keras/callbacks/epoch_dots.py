"""Compact progress of a training of many epochs."""

from __future__ import annotations

from typing import Any

import keras

from distnb.errors import OptionError

__all__ = ["EpochDots"]


class EpochDots(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that prints a dot per epoch, and a line with all numbers from time to time.

    On several replicas it prints once. Call `fit` with `verbose=0`.

    Args:
        report_every: The number of epochs between two lines; the first epoch has one.
        dot_every: The number of epochs per dot.

    Raises:
        OptionError: One of them is not a positive whole number.

    Example:
        model.fit(x, y, epochs=400, verbose=0, callbacks=[distnb.keras.EpochDots()])
    """

    def __init__(self, report_every: int = 100, dot_every: int = 1) -> None:
        super().__init__()
        for name, value in (("report_every", report_every), ("dot_every", dot_every)):
            if not isinstance(value, int) or value < 1:
                raise OptionError(f"EpochDots({name}={value!r}): give a whole number of epochs, 1 or more.")
        self._report_every, self._dot_every = report_every, dot_every
        self._in_a_line = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Print the line or the dot that is due after this epoch, numbered from 0."""
        if epoch % self._report_every == 0:
            self._end_line()
            numbers = ", ".join(f"{name} {float(value):.4f}" for name, value in sorted((logs or {}).items()))
            print(f"epoch {epoch + 1}: {numbers}")
        if epoch % self._dot_every == 0:
            print(".", end="", flush=True)
            self._in_a_line = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the line of dots."""
        self._end_line()

    def _end_line(self) -> None:
        if self._in_a_line:
            print()
        self._in_a_line = False

"""Progress of a training of many epochs in few characters."""

from __future__ import annotations

from typing import Any

import keras

from distnb.errors import OptionError

__all__ = ["EpochDots"]


class EpochDots(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints a dot for an epoch, and a line with all numbers now and then.

    On several replicas it prints once. Give `fit` `verbose=0` beside it.

    Args:
        report_every: A line each so many epochs, from the first one on.
        dot_every: A dot each so many epochs.

    Raises:
        OptionError: One of them is no whole number above 0.

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
        """Print what is due after this epoch, which is numbered from 0."""
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

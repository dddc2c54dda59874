"""TensorBoard's files, from Keras's callback, where there is no TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from distnb.errors import OptionError
from distnb.watching.tensorboard_writer import event_writer

__all__ = ["TensorBoard"]


class TensorBoard(keras.callbacks.TensorBoard):  # type: ignore[misc]
    """Keras's callback of this name, which writes by torch what it has TensorFlow write.

    It needs the package tensorboard: `pip install "distnb[keras]"`. On several replicas it writes once. The files are
    in `train/` and `validation/` of `log_dir`.

    Args:
        log_dir: The folder; `tensorboard --logdir` takes it.
        options: Of Keras's: `histogram_freq` and `write_images` (each so many epochs, weights), `update_freq` (each so
            many batches, losses and metrics; or "epoch"), `write_steps_per_second`.

    Raises:
        OptionError: An option for what TensorFlow alone can write, a graph, profile or embeddings.
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "logs", **options: Any) -> None:
        for name in ("write_graph", "profile_batch", "embeddings_freq", "embeddings_metadata"):
            if options.get(name):
                raise OptionError(
                    f"distnb.keras.TensorBoard({name}={options[name]!r}): it writes numbers, histograms and images. "
                    "keras.callbacks.TensorBoard writes the rest, and needs TensorFlow."
                )
        super().__init__(os.fspath(log_dir), **{**options, "write_graph": False})
        self._summaries = _Summaries()

    @property
    def summary(self) -> Any:
        """What Keras's callback writes by: with it, TensorFlow's module of this name."""
        return self._summaries


class _Summaries:
    """As much of `tensorflow.summary` as Keras's callback asks for."""

    def __init__(self) -> None:
        self._writers: list[Any] = []  # those that are written to, the innermost last
        self._conditions: list[Callable[[], bool]] = []

    def create_file_writer(self, folder: str) -> _Writer:
        return _Writer(folder, self._writers)

    @contextmanager
    def record_if(self, condition: Callable[[], bool]) -> Iterator[None]:
        self._conditions.append(condition)
        try:
            yield
        finally:
            self._conditions.pop()

    def scalar(self, name: str, data: Any, step: Any) -> None:
        self._write("add_scalar", name, float(data), step)

    def histogram(self, name: str, data: Any, step: Any) -> None:
        self._write("add_histogram", name, keras.ops.convert_to_numpy(data), step)

    def image(self, name: str, data: Any, step: Any) -> None:
        """Of shape `[1, height, width, channels]`; its values are stretched to what can be seen."""
        pixels = np.asarray(data)[0]
        low, high = float(pixels.min()), float(pixels.max())
        self._write("add_image", name, (pixels - low) / ((high - low) or 1.0), step, dataformats="HWC")

    def _write(self, method: str, name: str, data: Any, step: Any, **options: Any) -> None:
        # As TensorFlow's: what no writer was entered for, or at steps that are not asked for, is not written.
        if self._writers and all(condition() for condition in self._conditions[-1:]):
            getattr(self._writers[-1], method)(name, data, int(step), **options)


class _Writer:
    """One folder of files."""

    def __init__(self, folder: str, writers: list[Any]) -> None:
        self._writer = event_writer(folder)
        self._writers = writers

    @contextmanager
    def as_default(self, _step: Any = None) -> Iterator[None]:
        self._writers.append(self._writer)
        try:
            yield
        finally:
            self._writers.pop()

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

"""Keras's TensorBoard callback without TensorFlow."""

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
    """Keras's callback of this name, with a writer of torch in place of TensorFlow's.

    It needs the package tensorboard: `pip install "distnb[keras]"`. On several replicas it writes once. The files are
    in `train/` and `validation/` of `log_dir`.

    Args:
        log_dir: The folder, for `tensorboard --logdir`.
        options: Options of Keras's callback: `histogram_freq` and `write_images` (weights, every n epochs),
            `update_freq` (losses and metrics, every n batches; or "epoch"), `write_steps_per_second`.

    Raises:
        OptionError: An option that only TensorFlow can honour: a graph, profile or embeddings.
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
        """The module that Keras's callback writes with, in place of `tensorflow.summary`."""
        return self._summaries


class _Summaries:
    """The part of `tensorflow.summary` that Keras's callback uses."""

    def __init__(self) -> None:
        self._writers: list[Any] = []  # writers in use, the innermost last
        self._conditions: list[Callable[[], bool]] = []

    def create_file_writer(self, folder: str) -> _Writer:
        return _Writer(folder, self._writers)

    @contextmanager
    def record_if(self, condition: Callable[[], bool]) -> Iterator[None]:
        depth = len(self._conditions)
        try:
            self._conditions.append(condition)
            yield
        finally:
            del self._conditions[depth:]

    def scalar(self, name: str, data: Any, step: Any) -> None:
        self._write("add_scalar", name, float(data), step)

    def histogram(self, name: str, data: Any, step: Any) -> None:
        self._write("add_histogram", name, keras.ops.convert_to_numpy(data), step)

    def image(self, name: str, data: Any, step: Any) -> None:
        """Write an image `[1, height, width, channels]`. Its values are stretched to the visible range."""
        pixels = np.asarray(data)[0]
        low, high = float(pixels.min()), float(pixels.max())
        self._write("add_image", name, (pixels - low) / ((high - low) or 1.0), step, dataformats="HWC")

    def _write(self, method: str, name: str, data: Any, step: Any, **options: Any) -> None:
        # As with TensorFlow, nothing is written without a writer, or at steps that the condition excludes.
        if self._writers and all(condition() for condition in self._conditions[-1:]):
            getattr(self._writers[-1], method)(name, data, int(step), **options)


class _Writer:
    """A folder of event files."""

    def __init__(self, folder: str, writers: list[Any]) -> None:
        self._writer = event_writer(folder)
        self._writers = writers

    @contextmanager
    def as_default(self, _step: Any = None) -> Iterator[None]:
        depth = len(self._writers)
        try:
            self._writers.append(self._writer)
            yield
        finally:
            del self._writers[depth:]

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

"""The archives as which Keras pickles its objects, without their dates, so that equal objects have equal archives."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from typing import Any

__all__ = ["is_archived", "is_symbolic", "without_time"]

_METADATA = "metadata.json"


def is_archived(kind: type) -> bool:
    """Return whether Keras pickles objects of a class as an archive."""
    keras: Any = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "optimizers"):  # Keras is being imported
        return False
    return issubclass(kind, (keras.layers.Layer, keras.losses.Loss, keras.optimizers.Optimizer))


def is_symbolic(kind: type) -> bool:
    """Return whether a class is Keras's of symbolic tensors."""
    symbolic = getattr(sys.modules.get("keras"), "KerasTensor", None)
    return symbolic is not None and issubclass(kind, symbolic)


def without_time(reduced: Any) -> Any:
    """Return Keras's reduction of an object, with the dates in its archive removed.

    The archive's files, and an entry in one of them, are dated to the second. Replicas that pickle the same model at
    11:59:59 and 12:00:00 would have different digests.
    """
    match reduced:
        case (opens, (io.BytesIO() as archive,)) if zipfile.is_zipfile(archive):
            return opens, (_undated(archive),)
    return reduced


def _undated(archive: io.BytesIO) -> io.BytesIO:
    undated = io.BytesIO()
    with zipfile.ZipFile(archive) as files, zipfile.ZipFile(undated, "w") as copies:
        for file in files.infolist():
            content = files.read(file)
            if file.filename == _METADATA:
                content = json.dumps(json.loads(content) | {"date_saved": ""}).encode()
            copies.writestr(zipfile.ZipInfo(file.filename), content)  # dated to 1980
    undated.seek(0)
    return undated

"""Private names of pandas: the data that tables share until one of them is changed. Importing this loads no pandas."""

from __future__ import annotations

import sys
from typing import Any

from distnb.compat.versions import private_names

__all__ = ["is_table", "state_apart"]


def is_table(kind: type) -> bool:
    """Return whether a class is a DataFrame or a Series of a pandas that copies on write."""
    pandas = sys.modules.get("pandas")
    if not hasattr(pandas, "Series"):  # it is not imported, or not completely
        return False
    copies = int(str(pandas.__version__).partition(".")[0]) >= 3  # type: ignore[union-attr]
    return copies and issubclass(kind, (pandas.DataFrame, pandas.Series))  # type: ignore[union-attr]


def state_apart(table: Any) -> dict[str, Any] | None:
    """Return the state of a table that shares data with another one, with a copy of the data; None for other tables.

    The other side does not know that the data is shared, and would change both tables at once.
    """
    with private_names("pandas"):
        manager = table._mgr
        shared = any(block.refs.has_reference() for block in manager.blocks)
        getstate = sys.modules["pandas.core.generic"].NDFrame.__getstate__
    if not shared or type(table).__getstate__ is not getstate:
        return None
    return {**table.__getstate__(), "_mgr": manager.copy(deep=True)}

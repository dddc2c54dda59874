"""The kernel's copy of a widget that exists on a replica. Pages show the copy and request its state from the kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ipywidgets

__all__ = ["WidgetCopy"]


class WidgetCopy(ipywidgets.Widget):  # type: ignore[misc]
    """A read-only widget of any kind, defined by its state alone. Changes from a page are ignored.

    Args:
        model_id: The id of the replica's widget. The states of other widgets refer to it.
        state: The state to send to pages.
    """

    def __init__(self, model_id: str, state: dict[str, Any]) -> None:
        self.state = state
        for name in ("_model_name", "_model_module", "_model_module_version"):
            self.set_trait(name, state[name])  # read-only traits, which pages need when the comm is opened
        super().__init__(model_id=model_id)

    def get_state(self, key: str | Iterable[str] | None = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the state, or a part of it."""
        names = tuple(self.state) if key is None else (key,) if isinstance(key, str) else tuple(key)
        return {name: self.state[name] for name in names if name in self.state}

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Ignore a change from a page."""

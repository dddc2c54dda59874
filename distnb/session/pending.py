"""The result of a call that nobody waits for yet: `RunOptions(wait=False)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Pending", "resolve"]


class Pending:
    """Stands for a result that is still on its way; using it in any way waits for it, and raises what went wrong."""

    __slots__ = ("_finish", "_value")

    def __init__(self, finish: Callable[[], Any]) -> None:
        object.__setattr__(self, "_finish", finish)

    def __getattr__(self, name: str) -> Any:
        return getattr(resolve(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(resolve(self), name, value)

    def __repr__(self) -> str:
        return repr(resolve(self))

    def __getitem__(self, key: Any) -> Any:
        return resolve(self)[key]

    def __iter__(self) -> Any:
        return iter(resolve(self))

    def __len__(self) -> int:
        return len(resolve(self))

    def __bool__(self) -> bool:
        return bool(resolve(self))

    def __float__(self) -> float:
        return float(resolve(self))

    def __int__(self) -> int:
        return int(resolve(self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return resolve(self)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (resolve(self),)


def _itself(value: Any) -> Any:
    return value


def resolve(value: Any) -> Any:
    """The value itself, once it is there; anything that is not pending is returned as it is.

    Raises:
        BaseException: What the call raised on the replicas.
    """
    if type(value) is not Pending:
        return value
    try:
        return object.__getattribute__(value, "_value")
    except AttributeError:
        result = object.__getattribute__(value, "_finish")()
        object.__setattr__(value, "_value", result)
        return result

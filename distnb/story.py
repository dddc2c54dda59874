"""State machines without IO that keep a story: the latest transitions, each with the state before and after.

A state machine gets events, with the time, and returns orders. Each event is a method marked by `transition`. With
DISTNB_VALIDATE=1 the invariants are checked after each transition; tests run with it.

Example:
    >>> class Counter(StateMachine):
    ...     log = logging.getLogger("distnb.example")
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.n = 0
    ...     def state(self):
    ...         return self.n
    ...     def violations(self):
    ...         return ["the count is negative"] if self.n < 0 else []
    ...     @transition
    ...     def add(self, n, now):
    ...         self.n += n
    ...         return []
    >>> counter = Counter()
    >>> counter.add(2, now=1.5)
    []
    >>> print(counter.story[-1])
    1.500 add(2): 0 -> 2
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

from distnb.errors import InvariantError

__all__ = ["StateMachine", "Transition", "transition"]

_LENGTH = 256
_SHOWN = 20

P = ParamSpec("P")
Orders = TypeVar("Orders", bound=Sequence[object])


class Transition(NamedTuple):
    """A transition of a state machine.

    Attributes:
        time: When it happened, by the caller's clock, in seconds.
        event: The name of the event.
        details: The event's arguments, without the time.
        before: The state before it, in words.
        after: The state after it, in words.
        orders: The orders that it gave.
    """

    time: float
    event: str
    details: tuple[Any, ...]
    before: str
    after: str
    orders: tuple[object, ...]

    def __str__(self) -> str:
        details = ", ".join(map(repr, self.details))
        orders = "".join(f"\n    {order}" for order in self.orders)
        return f"{self.time:.3f} {self.event}({details}): {self.before} -> {self.after}{orders}"


class _Kept(NamedTuple):
    """A transition as it is kept: most are never read, so nothing is put into words."""

    event: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    before: Any
    after: Any
    orders: Sequence[object]


class StateMachine(ABC):
    """A state machine with a story.

    Attributes:
        log: The logger that gets each transition, at level debug.
    """

    log: ClassVar[logging.Logger]

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=_LENGTH)
        self._after: object = None  # the state after the latest event: nothing else changes it
        self._validates = os.environ.get("DISTNB_VALIDATE") == "1"

    @abstractmethod
    def state(self) -> object:
        """Return the state in brief: a value that is cheap to make, and that later events do not change."""

    def in_words(self, state: Any) -> str:
        """Return such a state as text."""
        return str(state)

    @abstractmethod
    def violations(self) -> Iterable[str]:
        """Return a sentence for each invariant that does not hold."""

    @property
    def story(self) -> list[Transition]:
        """The latest transitions, the oldest first."""
        return [self._transition(kept) for kept in list(self._kept)]

    def _transition(self, kept: _Kept) -> Transition:
        arguments = inspect.signature(getattr(self, kept.event)).bind(*kept.arguments, **kept.keywords).arguments
        now = arguments.pop("now")
        words = self.in_words(kept.before), self.in_words(kept.after)
        return Transition(now, kept.event, tuple(arguments.values()), *words, tuple(kept.orders))

    def _keep(self, kept: _Kept) -> None:
        self._kept.append(kept)
        if self.log.isEnabledFor(logging.DEBUG):
            self.log.debug("%s", self._transition(kept))
        if self._validates:
            self.validate()

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: One does not hold; the story is in the text.
        """
        violations = list(self.violations())
        if violations:
            latest = "\n".join(map(str, self.story[-_SHOWN:]))
            raise InvariantError(
                f"{type(self).__name__} is in a state that contradicts itself: {'; '.join(violations)}. This is a "
                f"defect of distnb. Report it with the story, which is, the latest transition last:\n{latest}"
            )


def transition(method: Callable[P, Orders]) -> Callable[P, Orders]:
    """Make a method that handles an event, with the time as its argument `now`, add to its machine's story.

    A `tick` without orders is left out, since time passes often and seldom changes anything.
    """
    name = method.__name__

    @functools.wraps(method)
    def handle(*args: P.args, **kwargs: P.kwargs) -> Orders:
        machine: Any = args[0]
        before = machine._after
        if before is None:
            before = machine.state()
        orders = method(*args, **kwargs)
        after = machine._after = machine.state()
        if orders or name != "tick":
            machine._keep(_Kept(name, args[1:], kwargs, before, after, orders))
        return orders

    return handle

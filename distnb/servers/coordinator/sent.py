"""The record of the resources sent to a worker. A closure brings only the resources that the worker lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distnb.frames import cell_name
from distnb.objects.modes.environment import Environment
from distnb.servers.closure_messages import Fence, RunClosure
from distnb.servers.coordinator.packer import ClosurePacker, PackedClosure

__all__ = ["Sent"]


@dataclass
class Sent:
    """The resources that a worker knows.

    `forgotten`, `sources` and `freed` are the numbers of entries of `ClosurePacker.forgotten`, `ClosurePacker.sources`
    and `Represented.freed` that were sent to it.
    """

    known: set[int] = field(default_factory=set)
    forgotten: int = 0
    sources: int = 0
    freed: int = 0
    seeded: bool = False
    modes: Environment | None = None

    def message(
        self,
        program: int,
        closure: int,
        fence: Fence,
        packed: PackedClosure,
        packer: ClosurePacker,
        seed: Callable[[], int],
    ) -> RunClosure:
        """Return the message that runs a closure on the worker, with everything it lacks, and record that as sent."""
        definitions: tuple[tuple[int, Any], ...] = ()
        if not self.known.issuperset(packed.needs):
            definitions = tuple(each for each in packed.needs.items() if each[0] not in self.known)
        forget: tuple[int, ...] = ()
        if self.forgotten != packer.forgotten:
            self.forgotten = packer.forgotten
            forget = tuple(each for each in self.known if not packer.knows(each) and each not in packed.needs)
            self.known.difference_update(forget)
        self.known.update(packed.needs)
        sources: tuple[tuple[str, str, str], ...] = ()
        if self.sources < len(packer.sources):
            new = list(packer.sources.items())[self.sources :]
            sources = tuple((name, text, cell_name(name)) for name, text in new)
            self.sources += len(new)
        freed = tuple(packer.access.represented.freed[self.freed :])
        self.freed += len(freed)
        first = None if self.seeded else seed()
        self.seeded = True
        modes = None if packed.modes is self.modes else packed.modes
        self.modes = packed.modes
        inputs = tuple([(each.number, each.packed) for each in packed.inputs]) if packed.inputs else ()
        return RunClosure(
            program=program,
            closure=closure,
            fence=fence,
            definitions=definitions,
            data=packed.data,
            buffers=packed.buffers,
            inputs=inputs,
            forget=forget,
            freed=freed,
            sources=sources,
            modes=modes,
            seed=first,
        )

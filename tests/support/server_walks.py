"""Random walks of a coordinator, its workers and its servers, compared with plain addition: every count is exact."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distnb
from distnb.checkpoint.states import object_states as states
from distnb.coordinator import ClusterCoordinator
from distnb.errors import ClosureCancelled, ServerLost
from distnb.partitioners import FixedShardsPartitioner
from distnb.servers.coordinator.libraries import Library, register_library
from tests.support.simulated_cluster import SimulatedCluster

__all__ = ["Walk"]


class MeantToFail(Exception):
    """An error that a closure raises on purpose."""


class Counting(torch.nn.Module):
    """A model that counts its passes in a buffer."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 2))
        self.bias = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 2:
            self.passes += 1
        else:
            self.passes = self.passes + 1
        return x @ self.weight


class Ones:
    """A metric of its own kind; torchmetrics takes seconds to load."""

    def __init__(self) -> None:
        self.total = torch.zeros(())

    def update(self, value: torch.Tensor) -> None:
        self.total = self.total + value


class OnesLibrary(Library):
    def is_metric(self, obj: Any) -> bool:
        return isinstance(obj, Ones)

    def reset(self, metric: Ones) -> None:
        metric.total = torch.zeros(())

    def contribution(self, metric: Ones) -> torch.Tensor | None:
        return metric.total if metric.total else None

    def merge(self, metric: Ones, contribution: torch.Tensor) -> None:
        metric.total = metric.total + contribution


register_library(OnesLibrary())


class Program:
    """A user's objects. Each is changed only by ones, so that its exact value is known."""

    def __init__(self) -> None:
        self.strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2))
        self.coordinator = ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            self.model = Counting()
            self.unit = torch.optim.SGD(self.model.parameters(), lr=1.0)
            self.counter = distnb.Variable(0, dtype=torch.int64)
            self.small = distnb.Variable(torch.zeros(3), trainable=False)
            self.table = distnb.Variable(torch.zeros(4, 2))
            self.words = torch.nn.Embedding(4, 2, sparse=True)
            torch.nn.init.zeros_(self.words.weight)
            self.words_unit = torch.optim.SGD(self.words.parameters(), lr=1.0)
            self.seen = Ones()
            self.aside = distnb.Variable(torch.zeros(2), trainable=False)
        self.other = ClusterCoordinator(distnb.ParameterServerStrategy())
        self.objects = {
            "model": self.model,
            "unit": self.unit,
            "counter": self.counter,
            "small": self.small,
            "table": self.table,
            "aside": self.aside,
            "words": self.words,
            "words_unit": self.words_unit,
        }

    def changes(self) -> dict[str, Callable[[], Any]]:
        """Return changes by one, in closures and on the coordinator."""
        model, unit, words, words_unit = self.model, self.unit, self.words, self.words_unit
        counter, small, table, seen = self.counter, self.small, self.table, self.seen

        def step() -> None:
            model.weight.grad, model.bias.grad = -torch.ones(3, 2), -torch.ones(2)
            unit.step()
            unit.zero_grad()

        def looked_up() -> None:
            words_unit.zero_grad()  # at the beginning: Ctrl-C may have ended an earlier call after its backward pass
            with torch.enable_grad():
                words(torch.tensor([0, 1, 2, 3])).sum().neg().backward()
            words_unit.step()

        def increments(variable: Any) -> dict[str, Callable[[], Any]]:
            ones = torch.ones(tuple(variable.shape), dtype=variable.dtype)
            return {
                "assign_add": lambda: variable.assign_add(1),
                "assign_add ones": lambda: variable.assign_add(ones),
                "assign_sub": lambda: variable.assign_sub(-1),
            }

        def rows_of(variable: Any) -> dict[str, Callable[[], Any]]:
            def one_by_one() -> None:
                for row in range(variable.shape[0]):
                    variable.scatter_sub([row], -torch.ones(1, *variable.shape[1:]))

            def scattered() -> None:
                rows = list(range(variable.shape[0]))
                variable.scatter_add(rows, torch.ones(tuple(variable.shape)))

            return {"rows": one_by_one, "scatter": scattered}

        found: dict[str, Callable[[], Any]] = {"step": step, "words": looked_up}
        found["pass"] = lambda: model(torch.ones(1, 3))
        found["assigning pass"] = lambda: model(torch.ones(2, 3))
        for name, variable in (("counter", counter), ("small", small), ("table", table)):
            more = increments(variable) | (rows_of(variable) if variable.dim() else {})
            found |= {f"{name} {how}": change for how, change in more.items()}
        found["seen"] = lambda: seen.update(torch.ones(()))
        return found

    def values(self) -> dict[str, torch.Tensor]:
        """Return the current value of each, read from the servers."""
        access = self.strategy.runtime.access
        stored = {
            name: access.represented.stored_of(each)
            for name, each in [*self.model.named_parameters(), *self.model.named_buffers()]
        }
        return {
            **{name: access.requests.read(each) for name, each in stored.items()},
            "counter": self.counter.read_value(),
            "small": self.small.read_value(),
            "table": self.table.read_value(),
            "aside": self.aside.read_value(),
            "steps": torch.tensor(self.unit.iterations),
            "words": self.words.weight.read_value(),
            "words steps": torch.tensor(self.words_unit.iterations),
            "seen": self.seen.total,
        }


CHANGED: dict[str, tuple[str, ...]] = {
    "words": ("words", "words steps"),
    "step": ("weight", "bias", "steps"),
    "pass": ("passes",),
    "assigning pass": ("passes",),
    "seen": ("seen",),
}


def changed_by(change: str) -> tuple[str, ...]:
    return CHANGED.get(change) or (change.split()[0],)


class Walk:
    """A user's random walk.

    Attributes:
        certain: The number of ones that each thing must have.
        open: The number of further ones that it may have, from closures that were cancelled or failed.
        unsent: The changes made in place here that the servers may not know yet. Ctrl-C may lose them.
    """

    def __init__(self, seed: int, cluster: SimulatedCluster) -> None:
        self.cluster, self.draws = cluster, random.Random(seed)
        self.program = Program()
        self.coordinator = self.program.coordinator
        self.access = self.program.strategy.runtime.access
        self.certain: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self.unsent: Counter[str] = Counter()
        self.values: list[tuple[Any, list[str]]] = []
        self.of_other: list[Any] = []
        self.saved: tuple[dict[str, Any], Counter[str]] | None = None
        self.story: list[str] = []

    def moves(self) -> list[tuple[float, Callable[[], None]]]:
        """Return the possible moves of the walk, with weights."""
        return [
            (10, self.schedule),
            (8, self.advance),
            (3, self.schedule_other),
            (4, self.read),
            (4, self.change),
            (2, self.check),
            (2, self.kill),
            (2, self.lose),
            (2, self.stop),
            (2, self.go_on),
            (2, self.give_up),
            (2, self.fail),
            (2, self.interrupt),
            (1, self.save),
            (1, self.lose_server),
            (2, self.press),
        ]

    def run(self, length: int) -> None:
        """Walk a number of steps, and check the final state."""
        self.save()
        weights, choices = zip(*self.moves(), strict=True)
        for _ in range(length):
            move = self.draws.choices(choices, weights)[0]
            self.story.append(move.__name__)
            try:
                move()
            except MeantToFail:
                self.story.append("it failed")
                self.finish()
        self.cluster.go_on()
        self.cluster.drain()  # workers that were given up on come to an end
        self.check()

    # Moves of the user ----------------------------------------------------------------------------------------------

    def schedule(self, fails: bool = False) -> None:
        changes = self.program.changes()
        names = self.draws.choices(list(changes), k=self.draws.randint(1, 4))
        chosen = [changes[name] for name in names]
        self.story.append(f"  {names}")

        def closure() -> int:
            with torch.no_grad():
                for change in chosen:
                    change()
            if fails:
                raise MeantToFail
            return len(chosen)

        for _ in range(self.draws.randint(1, 4)):
            value = self.coordinator.schedule(closure)
            self.values.append((value, names))

    def schedule_other(self) -> None:
        """Schedule closures of another program on the same workers. They do not end with this program's closures."""
        aside = self.program.aside

        def closure() -> None:
            for _ in range(12):
                aside.read_value()
            aside.assign_add(1)

        self.of_other += [self.program.other.schedule(closure) for _ in range(self.draws.randint(1, 2))]

    def fail(self) -> None:
        self.schedule(fails=True)

    def advance(self) -> None:
        self.cluster.advance(self.draws)

    def change(self) -> None:
        """Change something on the coordinator."""
        model = self.program.model
        changes = self.program.changes()
        del changes["seen"], changes["pass"], changes["assigning pass"]

        def of_copies(how: str) -> None:
            for name in ("weight", "bias", "passes"):
                each = getattr(model, name)
                if how == "data":
                    each.data.add_(1)
                elif how == "rows" and each.dim() > 1:
                    for row in each:
                        row.add_(1)
                else:
                    each.add_(1)

        copies = [f"copies {how}" for how in ("add_", "rows", "data")]
        name = self.draws.choice([*changes, *copies])
        self.story.append(f"  {name}")
        with torch.no_grad():
            if name in copies:
                of_copies(name.split()[1])
                self.certain.update(["weight", "bias", "passes"])
                self.unsent.update(["weight", "bias", "passes"])
                return
            try:
                changes[name]()
            except KeyboardInterrupt:
                self.open.update(changed_by(name))
                raise
            self.certain.update(changed_by(name))

    def press(self) -> None:
        """Press Ctrl-C while something is read, changed or scheduled."""
        try:
            self.cluster.press(self.draws, self.draws.choice([self.read, self.change, self.change, self.schedule]))
        except KeyboardInterrupt:
            self.story.append("  pressed")
            self.certain.subtract(self.unsent)
            self.open.update(self.unsent)
            self.finish()

    def read(self) -> None:
        """Read something in one of the possible ways, which changes nothing."""
        program = self.program
        ways: list[Callable[[], Any]] = [
            lambda: program.counter.item(),
            lambda: program.small.mean(),
            lambda: program.small + program.table[0, 0],
            lambda: program.table.sum(),
            lambda: program.table[1:3].mean(),
            lambda: [row + 1 for row in program.small],
            lambda: program.words(torch.tensor([1, 2])),
            lambda: program.words.weight[1:3].mean(),
            lambda: program.model.weight.sum(),
            lambda: program.model.state_dict(),
            lambda: program.unit.state_dict(),
            lambda: torch.equal(program.small, program.small),
            lambda: states.state_of(program.objects, "objects"),
            lambda: states.state_of(program.model.weight, "weight"),
            self.access.copies.refresh,
            self.access.copies.fetch_changes,
        ]
        self.draws.choice(ways)()

    def save(self) -> None:
        """Take a checkpoint when nothing is under way."""
        self.check()
        saved = states.state_of(self.program.objects, "objects")
        saved = {
            name: torch.utils._pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, each
            )
            for name, each in saved.items()
        }
        self.saved = saved, self.certain.copy()

    def kill(self) -> None:
        self.cluster.kill(self.draws)

    def lose(self) -> None:
        self.cluster.lose(self.draws)

    def stop(self) -> None:
        self.cluster.stop(self.draws)

    def go_on(self) -> None:
        self.cluster.go_on()

    def give_up(self) -> None:
        self.cluster.give_up()

    def interrupt(self) -> None:
        self.coordinator._end_all()
        self.finish()

    def lose_server(self) -> None:
        server = self.cluster.kill_a_server(self.draws)
        with pytest.raises((ServerLost, MeantToFail)):
            self.coordinator.join() if self.draws.random() < 0.5 else self.coordinator.schedule(int)
        self.cluster.replace_server(server)
        saved, certain = self.saved  # type: ignore[misc]
        self.coordinator.recover(
            lambda: states.restore_all(self.program.objects, saved, "the checkpoint", lambda lines: lines)
        )
        self.program.other.recover(lambda: None)  # keep the restored values
        self.resolve()
        self.certain = certain.copy()
        self.open.clear()
        self.program.seen.total = torch.zeros(())
        self.certain["seen"] = 0
        self.of_other.clear()

    # The known state ------------------------------------------------------------------------------------------------

    def resolve(self) -> None:
        """Note the certain and possible changes of the closures that have ended."""
        left = []
        for value, names in self.values:
            every = [each for name in names for each in changed_by(name)]
            if not value.ended:
                left.append((value, names))
            elif value.state == "done":
                self.certain.update(every)
            else:
                with pytest.raises((ClosureCancelled, MeantToFail, ServerLost)):
                    value.fetch()
                self.open.update(each for each in every if each != "seen")
        self.values = left

    def finish(self) -> None:
        """Note a cancellation: the closures' changes until now remain, and no more will follow."""
        with contextlib.suppress(MeantToFail):
            self.coordinator.join()
        self.coordinator.join()
        self.resolve()
        assert not self.values
        self.unsent.clear()
        for name, value in self.program.values().items():
            if name == "aside" and self.of_other:
                continue
            least, most = self.certain[name], self.certain[name] + self.open[name]
            within = bool((value >= least).all()) and bool((value <= most).all())
            assert within, f"{name} is {value.tolist()}, and should be {least} to {most}"
            if self.open[name]:
                self.even_out(name, value)
        self.open.clear()

    def even_out(self, name: str, value: torch.Tensor) -> None:
        """Make the shards equal again after a cancelled closure has changed some of them."""
        most = int(value.max())
        program, access = self.program, self.access
        if bool((value == most).all()):
            self.certain[name] = most
            return
        assert value.dim(), f"{name} has one shard"
        if name == "words":
            program.words.weight.assign(float(most))
        elif hasattr(program, name):
            getattr(program, name).assign(float(most))
        else:
            access.requests.write(
                access.represented.stored_of(getattr(program.model, name)), "assign", torch.full_like(value, most)
            )
        self.certain[name] = most

    def check(self) -> None:
        """Wait until all closures have ended, and check every value."""
        self.program.other.join()
        self.certain["aside"] += len(self.of_other)
        self.of_other.clear()
        self.finish()
        program = self.program
        model, words = program.model, program.words
        counter, table, small = program.counter, program.table, program.small
        here = {
            name: each.detach() for name, each in [*program.model.named_parameters(), *program.model.named_buffers()]
        }
        there = self.coordinator.schedule(
            lambda: {
                "counter": counter.read_value(),
                "table": (table + 0).detach(),
                "small": (small + 0).detach(),
                "weight": model.weight.detach().clone(),
                "passes": model.passes.clone(),
                "words": words(torch.tensor([0, 1, 2, 3])).detach(),
            }
        )
        for name, value in {**here, **self.coordinator.fetch(there)}.items():
            wanted = self.certain[name]
            assert bool((value == wanted).all()), f"{name} is {value.tolist()}, and should be {wanted}"

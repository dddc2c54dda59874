"""The reference: a program in plain torch, in one process. distnb is not imported here.

`reference` runs a program's text with a `strategy` and a `distnb` that only divide and add. If a program does something
else on each replica (`by_slices`), one process computes the replicas' slices one after another: gradients add up
in `.grad`, the first slice's `zero_grad` counts, and the last one's `step`. Running statistics are averaged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader

from tests.conformance.prelude import TEXT
from tests.conformance.program import Program


@functools.cache
def reference(name: str, replicas: int) -> dict[str, Any]:
    """Return a program's result, for that many replicas."""
    from tests.conformance.program import all_programs

    [program] = [each for each in all_programs() if each.name == name]
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.set_default_dtype(getattr(torch, program.dtype))
        try:
            if program.expected is not None:
                return program.expected(replicas, **program.constants)
            return _run(program, replicas if program.by_slices else 1)
        finally:
            torch.set_default_dtype(dtype)


def _run(program: Program, replicas: int) -> dict[str, Any]:
    strategy = PlainStrategy(replicas)
    names: dict[str, Any] = {
        "__name__": "__main__",
        "strategy": strategy,
        "distnb": _distnb(strategy),
        "torch": torch,
        **program.constants,
    }
    for text in (TEXT, program.module, program.text):
        exec(compile(text.replace("import distnb\n", ""), program.name, "exec"), names)
    return dict(names["result"])


class PlainStrategy:
    """The part of a strategy that programs use."""

    def __init__(self, replicas: int) -> None:
        self.num_replicas_in_sync = replicas
        self.replica = 0
        self.global_batch = 0

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(self)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.num_replicas_in_sync == 1:
            return function(*args, **(kwargs or {}))
        results, statistics = [], Statistics()
        for replica in range(self.num_replicas_in_sync):
            self.replica = replica
            with self._one_slice(), statistics.of_one_slice():
                chosen = [self._component(value) for value in args]
                results.append(function(*chosen, **{key: self._component(v) for key, v in (kwargs or {}).items()}))
        statistics.average()
        self.replica = 0
        return None if results[0] is None else Slices(results)

    def _component(self, value: Any) -> Any:
        return value[self.replica] if isinstance(value, Slices) else value

    @contextlib.contextmanager
    def _one_slice(self) -> Iterator[None]:
        """Let the first slice clear gradients, and the last one use them."""
        replaced: list[tuple[type, str, Any]] = []
        classes = {torch.optim.Optimizer, *_subclasses(torch.optim.Optimizer)}
        absent = [("zero_grad", self.replica == 0), ("step", self.replica == self.num_replicas_in_sync - 1)]
        for kind in classes:
            for method, counts in absent:
                if not counts and method in vars(kind):
                    replaced.append((kind, method, vars(kind)[method]))
                    setattr(kind, method, lambda *args, **options: None)
        try:
            yield
        finally:
            for kind, method, original in replaced:
                setattr(kind, method, original)

    def reduce(self, op: str, value: Any, axis: int | None) -> Any:
        assert axis is None
        if not isinstance(value, Slices):
            return value
        total = functools.reduce(lambda a, b: a + b, value)
        return total if op.lower() == "sum" else total / len(value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        return tuple(value) if isinstance(value, Slices) else (value,)

    def distribute_dataset(self, tensors: Any, batch_size: int | None = None) -> Any:
        """Return global batches, or slices of them. The batches of a loader are not cut."""
        return tensors if isinstance(tensors, DataLoader) else self._batches(tensors, batch_size or len(tensors))

    def _batches(self, tensors: Any, batch_size: int) -> Iterator[Any]:
        first = tensors[0] if isinstance(tensors, tuple) else tensors
        for begin in range(0, len(first), batch_size):
            cut = slice(begin, begin + batch_size)
            batch = tuple(each[cut] for each in tensors) if isinstance(tensors, tuple) else tensors[cut]
            self.global_batch = len(first[cut])
            yield batch if self.num_replicas_in_sync == 1 else self._slices(batch)

    def _slices(self, batch: Any) -> Slices:
        """Cut a batch into contiguous slices whose sizes differ by at most one, larger ones first."""
        parts = [
            torch.tensor_split(each, self.num_replicas_in_sync)
            for each in (batch if isinstance(batch, tuple) else (batch,))
        ]
        return Slices(zip(*parts, strict=True)) if isinstance(batch, tuple) else Slices(parts[0])


class Statistics:
    """Running statistics of the layers that are used: each slice begins with the same, and the ends are averaged."""

    def __init__(self) -> None:
        self._before: dict[_NormBase, dict[str, Any]] = {}
        self._after: list[dict[_NormBase, dict[str, Any]]] = []

    @contextlib.contextmanager
    def of_one_slice(self) -> Iterator[None]:
        used: set[_NormBase] = set()

        def begin(module: torch.nn.Module, args: Any) -> None:
            if isinstance(module, _NormBase) and module.track_running_stats and module not in used:
                used.add(module)
                before = self._before.setdefault(module, copy.deepcopy(module.state_dict()))
                module.load_state_dict({**module.state_dict(), **_running(before)})

        hook = register_module_forward_pre_hook(begin)
        try:
            yield
        finally:
            hook.remove()
        self._after.append({module: copy.deepcopy(module.state_dict()) for module in used})

    def average(self) -> None:
        for module, before in self._before.items():
            ends = [_running(after.get(module, before)) for after in self._after]
            for name in ("running_mean", "running_var"):
                setattr(module, name, torch.stack([end[name] for end in ends]).mean(dim=0))


def _running(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("running_mean", "running_var", "num_batches_tracked")}


class PlainVariable:
    """A number that one replica changes."""

    def __init__(self, value: float, **options: Any) -> None:
        self.value = torch.as_tensor(value)

    def assign(self, value: float) -> None:
        self.value = torch.as_tensor(value)

    def assign_add(self, value: float) -> None:
        self.value = self.value + value

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)


class Slices(list[Any]):
    """Values, one for each replica."""


def _subclasses(kind: type) -> set[type]:
    return {each for child in kind.__subclasses__() for each in (child, *_subclasses(child))}


def _distnb(strategy: PlainStrategy) -> types.SimpleNamespace:
    def compute_average_loss(losses: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
        weighted = losses if sample_weight is None else losses * sample_weight
        return weighted.sum() / (global_batch_size or strategy.global_batch or len(losses))

    def scale_regularization_loss(loss: Any) -> Any:
        return loss.sum() / strategy.num_replicas_in_sync

    return types.SimpleNamespace(
        nn=types.SimpleNamespace(
            compute_average_loss=compute_average_loss, scale_regularization_loss=scale_regularization_loss
        ),
        Variable=PlainVariable,
        replica_id=lambda: strategy.replica,
        get_strategy=lambda: strategy,
        shared_folder=tempfile.mkdtemp,
        get_replica_context=lambda: types.SimpleNamespace(all_reduce=lambda op, value: value),
        is_chief=lambda: strategy.replica == 0,
    )

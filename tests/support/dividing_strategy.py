"""A strategy outside distnb: `run` takes global batches, and each replica gets its rows of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from distnb.options import RunOptions, StrategySpec
from distnb.strategies import Strategy

if TYPE_CHECKING:
    from distnb.runtime.spmd import SpmdProcess

__all__ = ["DividingStrategy"]


class DividingStrategy(Strategy):
    """Variables are mirrored. Of every tensor in the arguments of `run` a replica gets its share of the rows."""

    def __new__(cls, columns: bool = False) -> Self:
        strategy = cls._of(
            StrategySpec(kind=cls.kind, devices=(), num_replicas=0, options=(("columns", True),) if columns else ())
        )
        strategy._meet()
        return strategy

    def make_runtime(self, process: SpmdProcess) -> Any:
        import torch

        from distnb.runtime.replica import Spmd

        axis = 1 if self.spec.option("columns") else 0

        def share(value: Any) -> Any:
            is_batch = isinstance(value, torch.Tensor)
            return torch.tensor_split(value, process.size, axis)[process.rank] if is_batch else value

        class Dividing(Spmd):
            def run(
                self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions | None
            ) -> Any:
                own = {name: share(value) for name, value in kwargs.items()}
                return super().run(fn, list(map(share, args)), own, options)

        return Dividing(process, self)

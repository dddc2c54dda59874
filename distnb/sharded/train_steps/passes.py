"""Backward passes through sharded models: how the replicas' gradients are combined.

FSDP divides gradients by the number of replicas. Here they have the meaning that mirrored ones have:

    in strategy.run        the sum over the replicas, or the mean weighted by the sizes of the slices
    outside, in a cell     all replicas compute the same: the sum divided by their number
    under no_sync()        each replica keeps its own, unsharded, until a pass outside

A parameter that a pass reaches on some replicas counts as zero on the others. Without a gradient anywhere it gets none.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import torch_device
from distnb.collectives.gradients.backward_passes import BACKWARD_PASSES
from distnb.collectives.gradients.optimizer_steps import optimized
from distnb.collectives.gradients.parameter_groups import AGGREGATED
from distnb.collectives.gradients.replica_comparison import find_unlike
from distnb.collectives.verify import callsite
from distnb.compat import fsdp_internals, torch_internals
from distnb.errors import GradientError, UnsyncedGradientError
from distnb.sharded.making.lost_values import require_values
from distnb.sharded.parts import is_whole, local_part, part_of
from distnb.sharded.whole_copies import holds_shards

if TYPE_CHECKING:
    from distnb.collectives.gradients.gradient_sync import GradientSync
    from distnb.collectives.group.interface import Group

__all__ = ["ShardedPasses"]

_TOLERANCE = 1e-5  # relative to the gradients' norm: the last bits of a sum differ between processors


class ShardedPasses:
    """The observation of backward passes for one strategy's sharded models.

    Args:
        group: Returns the current process group.
        sync: The synchronisation of the strategy's other parameters, which knows about `no_sync`, slices and losses.
        in_replica: Returns whether a pass that begins now is one replica's part of a step.
        before_common_pass: Called before a pass in which all replicas compute the same. It may shard modules.

    Attributes:
        roots: The sharded models.
    """

    def __init__(
        self,
        group: Callable[[], Group],
        sync: GradientSync,
        in_replica: Callable[[], bool],
        before_common_pass: Callable[[], None],
    ) -> None:
        self._group = group
        self._sync = sync
        self._in_replica = in_replica
        self._before_common_pass = before_common_pass
        self.roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # equal on all replicas
        self._count = itertools.count()
        self._error: GradientError | None = None
        self._compare = False
        self._scale = 1.0  # the factor of this replica's gradients in the current pass
        self._sums = False  # whether gradients of different replicas are combined
        self._used: dict[int, bool] = {}  # by the `id()`s of the shards that the pass reduces
        self._filled: dict[int, bool] = {}  # shards that got zeros, and whether they had a gradient before
        # Units that the current pass has reached, and those whose parameters graphs of gradients use, in the order of
        # the passes, which is equal on all replicas.
        self._visited: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._in_graphs: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._synced: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._unreduced: weakref.WeakSet[Any] = weakref.WeakSet()  # models that may have gradients from under `no_sync`

    def add(self, root: Any) -> None:
        """Observe the passes of a sharded model."""
        self.roots.add(root)
        self._numbers[root] = next(self._count)
        self._synced[root] = True
        self._sync.listen()  # before this listener on all replicas, also on new ones, which have opened no scope
        BACKWARD_PASSES.listen(self)

    def forget(self, root: Any) -> None:
        """Forget a model whose shards are about to be divided over other replicas."""
        self.roots.discard(root)
        self._in_graphs.clear()

    def observe(self, unit: Any, begin_reduction: Callable[[], None]) -> None:
        """Observe the gradients of a unit. `begin_reduction` is called before FSDP reduces them."""

        def before(gradients: fsdp_internals.UnitGradients) -> None:
            self._before_reduction(gradients)
            begin_reduction()

        fsdp_internals.observe(unit, before, self._after_reduction)

    # What autograd calls ----------------------------------------------------------------------------------------------

    @property
    def aggregates(self) -> bool:
        """True if there are sharded models."""
        return bool(self.roots)

    def begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        """Choose the factor of this replica's gradients."""
        self._forget()
        if any(map(holds_shards, roots)):
            raise GradientError(
                "backward() was called on a sharded tensor, which was computed from the parameters of a sharded model "
                "outside its `forward`. Gather it first: `penalty.full_tensor()`, or "
                "distnb.nn.scale_regularization_loss(penalty)."
            )
        size, equal = self._group().size, not self._in_replica()
        if equal:
            self._before_common_pass()
        self._compare = equal and size > 1
        self._error = None if equal or size == 1 else self._sync.mean_loss_of(roots)
        if create_graph:
            self._error = GradientError(
                "backward(create_graph=True) cannot reach a sharded model: FSDP frees the gathered parameters after "
                "the pass. Use a MirroredStrategy, or torch.autograd.grad on activations."
            )
        self._scale = 1 / size if equal else self._sync.scale(size)
        synced = self._sync.is_synced
        self._sums = synced and not equal and size > 1
        if not synced:
            self._unreduced.update(self.roots)
        for root in self.roots:
            fsdp_internals.share_hooks(root)
            if self._synced.get(root) is not synced:
                root.set_requires_gradient_sync(synced)
                self._synced[root] = synced
        self._keep_gathered()

    def aggregated(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a tensor that was gathered from shards in `strategy.run`: all replicas' together."""
        total = gradient.detach() * self._scale
        if self._group().size > 1:
            self._group().all_reduce(total, "sum")
        return total

    def end(self) -> None:
        """Handle the end of a pass."""
        self._release()
        if self._used:
            self._remove_unused()
        self._forget()

    def _forget(self) -> None:
        self._error, self._compare, self._sums = None, False, False
        self._used.clear()
        self._filled.clear()
        self._visited.clear()

    def failed(self) -> None:
        """Handle the error of a pass: discard what it has left half done."""
        self._forget()
        for unit in self._in_graphs:
            unit.is_kept = False
        self._in_graphs.clear()
        for root in self.roots:
            fsdp_internals.reset(root)

    @contextmanager
    def computing(self, inputs: Sequence[Any], create_graph: bool) -> Iterator[None]:
        """Refuse shards as inputs of `torch.autograd.grad`, and keep what a graph of gradients needs.

        Raises:
            GradientError: An input is a shard.
        """
        if any(map(holds_shards, inputs)):
            raise GradientError(
                "torch.autograd.grad does not reach the parameters of a sharded model: it reaches the whole parameters "
                "that FSDP gathers for a pass. Call loss.backward() and use parameter.grad, or make the model in the "
                "scope of a MirroredStrategy."
            )
        self._forget()
        self._keep_gathered()
        try:
            yield
            self._release()
        except BaseException:
            self.failed()
            raise
        if create_graph:
            self._in_graphs.update(self._visited)

    def _keep_gathered(self) -> None:
        """Gather the whole parameters that graphs of gradients use, for the pass that begins.

        FSDP gathers a unit when a pass reaches its outputs. A graph of gradients uses its parameters before.
        """
        for unit in self._in_graphs:
            unit.keep()

    def _release(self) -> None:
        kept = [unit for unit in self._in_graphs if unit.is_kept]
        for unit in kept:
            unit.is_kept = False
        for unit in kept:
            unit.release()

    # What FSDP calls --------------------------------------------------------------------------------------------------

    def _before_reduction(self, unit: fsdp_internals.UnitGradients) -> None:
        """Check and scale this replica's gradients of one unit, before they are combined.

        Raises:
            MeanLossError: The loss is a mean over this replica's slice.
            UnsyncedGradientError: All replicas should compute the same, and do not.
        """
        gradients = unit.new
        if unit.is_reached:
            self._visited[unit] = None
        if gradients and self._error is not None:
            error, self._error = self._error, None
            raise error
        if gradients and self._compare:
            self._compare = False
            self._compare_norms(gradients)
        if gradients and self._scale != 1.0:
            torch_internals.scale_each(gradients, self._scale)
        if self._sums and unit.is_reached:
            self._fill_unused(unit)

    def _after_reduction(self, unit: fsdp_internals.UnitGradients) -> None:
        unit.set_apart()  # only under `no_sync` is anything left

    def _fill_unused(self, unit: fsdp_internals.UnitGradients) -> None:
        unused = {}
        for shard, is_used in unit.used().items():
            self._used[id(shard)] = is_used or self._used.get(id(shard), False)
            if not is_used:
                unused[id(shard)] = shard.grad is not None
        self._filled = unused | self._filled
        unit.fill(unused)

    def _remove_unused(self) -> None:
        """Remove the zeros of parameters that no replica has used."""
        roots = sorted(self.roots, key=self._numbers.__getitem__)
        shards = [each for root in roots for each in fsdp_internals.shards_of(root) if id(each) in self._used]
        device = torch_device(self._group().device)
        flags = [self._used[id(each)] or self._has_more_than_zeros(each) for each in shards]
        used = torch.tensor(flags, dtype=torch.uint8, device=device)
        self._group().all_reduce(used, "max")
        if not self._filled:
            return
        for shard, is_used in zip(shards, used.tolist(), strict=True):
            if not is_used and not self._filled[id(shard)]:
                shard.grad = None

    def _has_more_than_zeros(self, shard: Any) -> bool:
        """Return whether a shard has got a gradient otherwise than from the unit's pass."""
        is_filled = self._filled.get(id(shard)) is False and shard.grad is not None
        return is_filled and bool(local_part(shard.grad).any())

    def _compare_norms(self, gradients: Sequence[torch.Tensor]) -> None:
        own = torch.stack([torch.linalg.vector_norm(each.detach().float()) for each in gradients])
        norms = torch.stack(self._group().all_gather(torch.linalg.vector_norm(own)))
        if bool(((norms - norms[0]).abs() > _TOLERANCE * norms.abs().max()).any()):
            raise UnsyncedGradientError(
                f"The gradients of a sharded model differ between the replicas in a backward pass outside "
                f"strategy.run, at {callsite.current()}: their norms are {[f'{norm:.6g}' for norm in norms.tolist()]}. "
                "Outside of it all replicas must compute the same. Compute the loss in a function, and call "
                "strategy.run(function, ...)."
            )

    # What optimizers call ---------------------------------------------------------------------------------------------

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check and divide gradients that a program has assigned, and check that none is from under `no_sync` only.

        Raises:
            StaleHandleError: The values of parameters, or of the optimizer's state, are lost.
            UnsyncedGradientError: There are gradients of this replica alone.
        """
        kind = type(optimizer).__name__
        parameters = optimized(optimizer)
        require_values(parameters, f"the parameters of this {kind}")
        states = (value for each in parameters for value in optimizer.state.get(each, {}).values())
        require_values(states, f"the state of this {kind}")
        whole = [parameter for parameter in parameters if is_whole(parameter.grad, parameter)]
        unknown = [parameter for parameter in whole if parameter.grad not in AGGREGATED]
        is_checked = unknown and self._in_replica() and self._group().size > 1
        if is_checked and find_unlike(self._group(), [parameter.grad for parameter in unknown]):
            raise UnsyncedGradientError(
                f"{kind}.step() on gradients of {len(unknown)} sharded parameters that were "
                "assigned by hand, never aggregated over the replicas, and differ: each replica would step with other "
                f"ones. The first has shape {list(unknown[0].shape)}. Aggregate them first: parameter.grad = "
                "distnb.get_replica_context().all_reduce(distnb.ReduceOp.SUM, gradient)."
            )
        for parameter in whole:
            parameter.grad = part_of(parameter.grad, parameter)
        for unit in [each for each in self._in_graphs if each.belongs_to(_numbers(optimizer))]:
            del self._in_graphs[unit]  # its graphs are of the parameters before the step
        for root in self._with_local_gradients():
            if fsdp_internals.has_local_gradients(root, _numbers(optimizer)):
                model = torch_internals.original_class(root).__name__
                raise UnsyncedGradientError(
                    f"{kind}.step() on gradients of {model} that were never aggregated over the "
                    "replicas: so far they come from backward passes under no_sync() only. Run the last backward pass "
                    "before each optimizer step outside no_sync()."
                )

    def zero_gradients(self, owner: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Discard gradients of an owner's shards that were made under `no_sync` and are not reduced yet."""
        for root in self._with_local_gradients():
            fsdp_internals.discard_local_gradients(root, _numbers(owner))

    def require_reduced(self) -> None:
        """Raise UnsyncedGradientError if a model has gradients that are not reduced yet."""
        if roots := self._with_local_gradients():
            raise UnsyncedGradientError(
                f"{torch_internals.original_class(roots[0]).__name__} has gradients from backward passes under "
                "no_sync() that were not aggregated yet, and the number of replicas is about to change. Finish the "
                "step first, or call model.zero_grad()."
            )

    def _with_local_gradients(self) -> list[Any]:
        """Return the models that have gradients which are not reduced yet. Without `no_sync` this costs nothing."""
        for root in list(self._unreduced):
            if not fsdp_internals.has_local_gradients(root):
                self._unreduced.discard(root)
        return list(self._unreduced)


def _numbers(owner: torch.nn.Module | torch.optim.Optimizer) -> set[int]:
    """Return the `id()`s of the parameters of a module or an optimizer."""
    if isinstance(owner, torch.nn.Module):
        return set(map(id, owner.parameters()))
    return {id(parameter) for group in owner.param_groups for parameter in group["params"]}

"""Backward passes through sharded models: how FSDP's reduce-scatter combines the replicas' gradients.

FSDP divides gradients by the number of replicas. Here they have the meaning that mirrored ones have:

    in strategy.run        the sum over the replicas, or the mean weighted by the sizes of the slices
    outside, in a cell     all replicas compute the same: the sum divided by their number
    under no_sync()        each replica keeps its own, unsharded, until a pass outside
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from distnb.collectives.gradients.backward_passes import BACKWARD_PASSES
from distnb.collectives.verify import callsite
from distnb.compat import fsdp_internals, torch_internals
from distnb.errors import GradientError, UnsyncedGradientError

if TYPE_CHECKING:
    from distnb.collectives.gradients.gradient_sync import GradientSync
    from distnb.collectives.group.interface import Group

__all__ = ["ScaledReduceScatter", "ShardedPasses"]

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
        scale: The factor of this replica's gradients in the current pass.
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
        self.scale = 1.0
        self._error: GradientError | None = None
        self._compare = False
        self._synced: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._unreduced: weakref.WeakSet[Any] = weakref.WeakSet()  # models that may have gradients from under `no_sync`

    def add(self, root: Any) -> None:
        """Observe the passes of a sharded model."""
        self.roots.add(root)
        self._synced[root] = True
        BACKWARD_PASSES.listen(self)

    # What autograd calls ----------------------------------------------------------------------------------------------

    @property
    def aggregates(self) -> bool:
        """True if there are sharded models."""
        return bool(self.roots)

    def begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        """Choose the factor of this replica's gradients."""
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
        self.scale = 1 / size if equal else self._sync.scale(size)
        synced = self._sync.is_synced
        if not synced:
            self._unreduced.update(self.roots)
        for root in self.roots:
            if self._synced.get(root) is not synced:
                root.set_requires_gradient_sync(synced)
                self._synced[root] = synced

    def end(self) -> None:
        """Handle the end of a pass."""
        self._error, self._compare = None, False

    def failed(self) -> None:
        """Handle the error of a pass: discard what it has left half done."""
        self.end()
        for root in self.roots:
            fsdp_internals.reset(root)

    # What FSDP calls --------------------------------------------------------------------------------------------------

    def before_reduction(self, gradients: torch.Tensor) -> None:
        """Check and scale this replica's gradients of one unit, before they are summed.

        Raises:
            MeanLossError: The loss is a mean over this replica's slice.
            UnsyncedGradientError: All replicas should compute the same, and do not.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._compare:
            self._compare = False
            self._compare_norms(gradients)
        if self.scale != 1.0:
            gradients.mul_(self.scale)

    def _compare_norms(self, gradients: torch.Tensor) -> None:
        norms = torch.stack(self._group().all_gather(torch.linalg.vector_norm(gradients.detach().float())))
        if bool(((norms - norms[0]).abs() > _TOLERANCE * norms.abs().max()).any()):
            raise UnsyncedGradientError(
                f"The gradients of a sharded model differ between the replicas in a backward pass outside "
                f"strategy.run, at {callsite.current()}: their norms are {[f'{norm:.6g}' for norm in norms.tolist()]}. "
                "Outside of it all replicas must compute the same. Compute the loss in a function, and call "
                "strategy.run(function, ...)."
            )

    # What optimizers call ---------------------------------------------------------------------------------------------

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UnsyncedGradientError if there are gradients of this replica alone, made under `no_sync`."""
        for root in self._with_local_gradients():
            if fsdp_internals.has_local_gradients(root, _numbers(optimizer)):
                model = torch_internals.original_class(root).__name__
                raise UnsyncedGradientError(
                    f"{type(optimizer).__name__}.step() on gradients of {model} that were never aggregated over the "
                    "replicas: so far they come from backward passes under no_sync() only. Run the last backward pass "
                    "before each optimizer step outside no_sync()."
                )

    def zero_gradients(self, owner: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Discard gradients of an owner's shards that were made under `no_sync` and are not reduced yet."""
        for root in self._with_local_gradients():
            fsdp_internals.discard_local_gradients(root, _numbers(owner))

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


class ScaledReduceScatter(fsdp_internals.DefaultReduceScatter):
    """The reduce-scatter of FSDP's gradients: a sum of the replicas' gradients, each with its factor."""

    def __init__(self, passes: ShardedPasses) -> None:
        super().__init__()
        self._passes = passes

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._passes.before_reduction(input_tensor)
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)

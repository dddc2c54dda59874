"""The host tensors of variables whose replicas are on accelerators.

An accelerator computes only with its own memory. A parameter on an accelerator is therefore a copy. The variable itself
is a tensor in host memory, which exists once, as the variables of CPU replicas do. Values move in two directions:

    device → host   A program's in-place changes of the copy are written to the host tensor when replicas synchronise.
    host → device   An optimizer steps the host tensors. Afterwards the copies are updated from them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["HostTensors", "OnHost"]


class HostTensors:
    """The host tensors for this replica's parameters on an accelerator."""

    def __init__(self) -> None:
        self._hosts = WeakTensorKeyDictionary()

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's host tensor, or None if it has none."""
        return self._hosts.get(tensor)  # type: ignore[no-any-return]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor to share: a CPU tensor itself, or the host tensor of a parameter on an accelerator."""
        if tensor.device.type == "cpu":
            return tensor
        if tensor not in self._hosts:
            self._hosts[tensor] = tensor.detach().cpu()
        return self._hosts[tensor]  # type: ignore[no-any-return]

    def release_replaced(self) -> Iterator[torch.Tensor]:
        """Release the host tensors of parameters with a new device, dtype or shape, and yield these parameters."""
        for parameter, host in list(self._hosts.items()):
            if parameter.device.type == "cpu" or parameter.dtype is not host.dtype or parameter.shape != host.shape:
                del self._hosts[parameter]
                yield parameter

    def update(self) -> None:
        """Copy the changes that programs have made on the device since the last update to the host tensors."""
        # Compare the values, because no counter covers every write: `p.data.mul_(2)` leaves the version of p unchanged.
        for parameter, host in list(self._hosts.items()):
            copied = parameter.detach().cpu()
            if not torch.equal(_bytes(copied), _bytes(host)):  # compares bits, so a NaN equals itself
                host.detach().copy_(copied)


class OnHost:
    """A period in which an optimizer has host tensors instead of its parameters on an accelerator, until `end`.

    The optimizer's state for these parameters moves to the host and stays there.
    """

    def __init__(self, optimizer: Optimizer, hosts: HostTensors) -> None:
        self._optimizer, self._before = optimizer, [dict(group) for group in optimizer.param_groups]
        found = [(each, hosts.find(each)) for group in optimizer.param_groups for each in group["params"]]
        self._pairs = [(parameter, host) for parameter, host in found if host is not None]
        in_place = {id(parameter): host for parameter, host in self._pairs}
        for parameter, host in self._pairs:
            host.grad = None if parameter.grad is None else parameter.grad.detach().cpu()
            if parameter in optimizer.state:
                optimizer.state[host] = optimizer.state.pop(parameter)
        self.move_state_to_host()
        for group in optimizer.param_groups if self._pairs else ():
            group["params"] = [in_place.get(id(parameter), parameter) for parameter in group["params"]]
            group.update({name: value.cpu() for name, value in group.items() if isinstance(value, torch.Tensor)})

    def move_state_to_host(self) -> None:
        """Move the optimizer's state for these parameters to the host."""
        for _, host in self._pairs:
            kept = self._optimizer.state.get(host, {})
            kept.update({key: value.cpu() for key, value in kept.items() if isinstance(value, torch.Tensor)})

    def end(self) -> None:
        """Restore the optimizer's parameters, and update them from the host tensors."""
        for group, before in zip(self._optimizer.param_groups, self._before, strict=True):
            kept = {name: value for name, value in before.items() if isinstance(value, torch.Tensor)}
            group.update(kept, params=before["params"])
        with torch.no_grad():
            for parameter, host in self._pairs:
                host.grad = None
                parameter.copy_(host)
                if host in self._optimizer.state:
                    self._optimizer.state[parameter] = self._optimizer.state.pop(host)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

"""Variables of replicas on accelerators: tensors of the host, of which each replica has a copy on its device.

An accelerator computes with its own memory only. So a parameter on one is a copy; the variable itself is a tensor of
the host, which lives once as those of CPU replicas do. What a program changes in place is the copy: it is taken over
when the replicas synchronise. An optimizer steps the tensors of the host, and then the copies are renewed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["HostTensors", "OnHost"]


class HostTensors:
    """The tensors of the host for this replica's parameters on an accelerator."""

    def __init__(self) -> None:
        self._hosts = WeakTensorKeyDictionary()

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the host's tensor for a parameter; None if it has none."""
        return self._hosts.get(tensor)  # type: ignore[no-any-return]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that lives once: one on the host itself; for one on an accelerator, the host's tensor."""
        if tensor.device.type == "cpu":
            return tensor
        if tensor not in self._hosts:
            self._hosts[tensor] = tensor.detach().cpu()
        return self._hosts[tensor]  # type: ignore[no-any-return]

    def release_replaced(self) -> Iterator[torch.Tensor]:
        """Return the parameters that were given another device, dtype or shape. They have no host tensor any more."""
        for parameter, host in list(self._hosts.items()):
            if parameter.device.type == "cpu" or parameter.dtype is not host.dtype or parameter.shape != host.shape:
                del self._hosts[parameter]
                yield parameter

    def take_over(self) -> None:
        """Write to the tensors of the host what programs changed on the device since they were renewed."""
        # No counter covers every write: `p.data.mul_(2)` leaves the version of p unchanged.
        for parameter, host in list(self._hosts.items()):
            copied = parameter.detach().cpu()
            if not torch.equal(_bytes(copied), _bytes(host)):  # to the last bit, NaNs included
                host.detach().copy_(copied)


class OnHost:
    """A context in which an optimizer holds tensors of the host in place of its parameters on an accelerator.

    What it keeps for them is on the host from then on.
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
        """Bring to the host what the optimizer keeps for these parameters."""
        for _, host in self._pairs:
            kept = self._optimizer.state.get(host, {})
            kept.update({key: value.cpu() for key, value in kept.items() if isinstance(value, torch.Tensor)})

    def end(self) -> None:
        """Give the optimizer its parameters again, and renew these."""
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

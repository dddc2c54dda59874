"""Two streams of random numbers: one that all replicas share, and one of each replica's own.

Outside replicas every process draws from the same state, so initial values and shuffles are equal. In `run` the global
generators of torch, NumPy and `random` hold a state that was folded with the replica's id. Their states are swapped,
because user code and torch's kernels draw from the global generators and from nothing else.

A replica's own stream begins anew, derived from the shared one, whenever the shared one moved (drawn from, seeded, or
set) since the last `run`; otherwise it goes on. So a program that seeds at its beginning repeats itself exactly, and
the shared stream is the same as in a run with one replica.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import generator
from distnb.runtime.gathering import broadcast_bytes
from distnb.runtime.generators import DeviceStream, NumpyStream, PythonStream, Stream, TorchStream

if TYPE_CHECKING:
    from distnb.collectives.groups import Group
    from distnb.topology import Device

__all__ = ["capture", "restore", "share", "streams"]


class Streams:
    """All global generators of this process, switched together. There is one instance, `streams`.

    Attributes:
        lingers: Whether `leave` is to wait for `settle`: nothing draws random numbers before that, or the next `enter`.
        lingering: Whether the replica's own streams are installed after a `run` that is over, for that reason.
        moves: Grows whenever the shared streams are found moved, or may have been drawn from in the midst of a `run`.
    """

    def __init__(self) -> None:
        self._torch: TorchStream | None = None
        self._streams: list[Stream] = []
        self._has_numpy = False
        self._devices: dict[Device, DeviceStream] = {}
        self._inside = False
        self._lent = False
        self._replica_id = self._entered = -1
        self.lingers = self.lingering = False
        self.moves = 0

    def _find_generators(self) -> None:
        if self._torch is None:
            self._torch = TorchStream()
            self._streams = [self._torch, PythonStream()]
        if not self._has_numpy and "numpy" in sys.modules:
            self._has_numpy = True
            self._streams.append(NumpyStream())

    def use_device(self, device: Device) -> None:
        """Switch this device's generator too, if it has one."""
        if device in self._devices:
            return
        own = generator(device)
        if own is not None:
            self._find_generators()
            self._devices[device] = DeviceStream(own)
            self._streams.append(self._devices[device])

    @property
    def device(self) -> DeviceStream | None:
        """That of the replica's accelerator."""
        return next(reversed(self._devices.values()), None)

    def enter(self, replica_id: int) -> None:
        """From the shared streams to the replica's own."""
        if self._inside:  # run within merge_call within run
            self._swap(to_shared=False)
            return
        if self.lingering:
            same = replica_id == self._replica_id and self.moves == self._entered
            if same and (self._has_numpy or "numpy" not in sys.modules):
                self.lingering, self._inside = False, True
                return
            self.settle()
        if not self._has_numpy:
            self._find_generators()
        assert self._torch is not None
        # Who seeds torch expects that everything begins anew.
        renew = renewed = self._torch.switch(replica_id)
        for stream in self._streams[1:]:
            renewed = stream.enter(replica_id, self._torch.key, renew) or renewed
        self.moves += renewed
        self._replica_id, self._entered, self._inside = replica_id, self.moves, True

    def leave(self) -> None:
        """Back to the shared streams."""
        if self._lent:
            self._swap(to_shared=True)
            return
        if self.lingers:
            self.lingering, self._inside = True, False
            return
        for stream in self._streams:
            stream.leave()
        self._inside = False

    def settle(self) -> None:
        """Carry out a `leave` that was put off: somebody may draw from the shared streams."""
        if self.lingering:
            for stream in self._streams:
                stream.leave()
            self.lingering = False

    def _swap(self, *, to_shared: bool) -> None:
        for stream in self._streams:
            if to_shared:
                stream.swap_to_shared()
            else:
                stream.swap_to_own()
        self._lent = to_shared
        self.moves += 1

    def reset(self) -> None:
        """Be outside replicas: what runs now may follow on a program that was ended in their midst."""
        if self._inside and not self._lent:
            for stream in self._streams:
                stream.leave()
        self._inside = self._lent = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Draw from the shared streams, also in the midst of a `run`."""
        self.settle()
        if not self._inside or self._lent:
            yield
            return
        self._swap(to_shared=True)
        try:
            yield
        finally:
            self._swap(to_shared=False)


streams = Streams()


def capture() -> dict[str, Any]:
    """The states of the global generators, ready to be pickled."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if streams.device is not None:
        states["device"] = streams.device.read()
    return states


def restore(states: dict[str, Any]) -> None:
    """Set what `capture` gave."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "device" in states and streams.device is not None:
        streams.device.write(states["device"])


def share(group: Group) -> None:
    """Give every replica the shared streams of replica 0. All replicas call it together."""
    with streams.shared():
        data = pickle.dumps(capture()) if group.rank == 0 else None
        received = broadcast_bytes(group, data, 0)
        if group.rank != 0:
            restore(pickle.loads(received))

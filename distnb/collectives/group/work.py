"""Operations under way: works whose waits any thread, and the user's Ctrl-C, can end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distnb import activity
from distnb.activity import Arrival
from distnb.collectives.eager import methods_always_eager
from distnb.collectives.group import exits

if TYPE_CHECKING:
    from distnb.collectives.group.communicator import Communicator

__all__ = ["DeviceWork", "HostWork", "Message", "Staging", "positive_seconds"]

_SLICE = timedelta(milliseconds=100)


def _ended(inner: Any) -> RuntimeError | None:
    """Wait a while for a work of Gloo. Return None if it completed, otherwise its error or a timeout error."""
    try:
        inner.wait(_SLICE)  # a wait that times out does not change the work, which can be waited for again
    except RuntimeError as error:
        return error.with_traceback(None)
    return None


def positive_seconds(timeout: timedelta | None) -> float | None:
    """Return the time limit of one wait, or None, which torch passes as zero or a negative number."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None


class Staging:
    """Host memory that represents an operation's tensors, and the copies to make when the operation has ended.

    Two kinds of operations need it: those on tensors of a GPU that replicas share, which only Gloo can carry, and
    reduce-scatters.

    Args:
        device: The device of the tensors.

    Attributes:
        devices: The devices as torch's futures expect them: none for the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.devices = [device] if device.type != "cpu" else []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._result: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def host(self, value: Any, *, written: bool) -> Any:
        """Copy a tensor, or each in nested lists, to the host; one that is `written` is copied back in the end."""
        if isinstance(value, torch.Tensor):
            copy = value.detach().to("cpu", copy=True)
            if written:
                self._pairs.append((value, copy))
            return copy
        return [self.host(each, written=written) for each in value]

    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], rank: int
    ) -> torch.Tensor:
        """Copy the inputs of a reduce-scatter into one tensor, whose sum over the replicas is to be scattered.

        `inputs[i]` has a part for each rank; in the end `outputs[i]` receives the sum of the parts for this rank.

        Raises:
            ValueError: An output and its part differ in size, or the dtypes of the tensors differ.
        """
        for output, parts in zip(outputs, inputs, strict=True):
            dtypes = {each.dtype for each in (outputs[0], output, *parts)}
            if len(dtypes) > 1:
                raise ValueError(
                    f"reduce_scatter got tensors of {' and '.join(sorted(map(str, dtypes)))}. Convert them to one "
                    "dtype, or make one call for each."
                )
            if parts[rank].numel() != output.numel():
                raise ValueError(
                    f"reduce_scatter got an output of shape {list(output.shape)} for this replica's part of the input, "
                    f"which has {parts[rank].numel()} elements. Make the output as large as that part."
                )
        pieces = [part.detach().reshape(-1) for parts in inputs for part in parts]
        flat = torch.cat(pieces).to("cpu")
        views = iter(flat.split([piece.numel() for piece in pieces]))
        for output, parts in zip(outputs, inputs, strict=True):
            own = [next(views) for _ in parts][rank]
            self._pairs.append((output, own.view(output.shape)))
        return flat

    def copy_back(self) -> Sequence[torch.Tensor]:
        """Copy the operation's results to the caller's tensors, and return these. Idempotent, on any thread."""
        with self._lock, torch.no_grad():
            for original, copy in self._pairs:
                original.copy_(copy)
            self._result += [original for original, _ in self._pairs]
            self._pairs = []
            return self._result


@methods_always_eager
class _GuardedWork(dist.Work):
    """A work that represents the backend's own work and ends with its communicator."""

    def __init__(self, communicator: Communicator, inner: Any) -> None:
        super().__init__()
        self._communicator = communicator
        self._inner = inner

    def result(self) -> Any:
        return self._inner.result()

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        return not self._communicator.failed and bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())


@methods_always_eager
class DeviceWork(_GuardedWork):
    """An operation under way in NCCL. Its `wait` makes the current stream wait, and never blocks."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._communicator.failed:
            self._communicator.raise_failure()
        return bool(self._inner.wait() if positive_seconds(timeout) is None else self._inner.wait(timeout))

    def synchronize(self) -> None:
        self._inner.synchronize()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._inner.get_future()  # type: ignore[no-any-return]


class Message(Future[list[Any]]):
    """A work for Gloo's send or receive, whose own wait would break the connection when it times out.

    A separate thread waits in Gloo, and the caller waits for the thread. An abort releases the caller only.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner
        thread = threading.Thread(target=self._run, name="distnb-message", daemon=True)
        exits.note(thread)
        thread.start()

    def _run(self) -> None:
        try:
            self._inner.wait()
        except RuntimeError as error:
            self.set_exception(error.with_traceback(None))
        else:
            self.set_result([])

    def wait(self, timeout: timedelta) -> None:
        """Wait for a while. Raise a RuntimeError at a time-out, as Gloo's other works do."""
        try:
            self.result(timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("It is under way.") from error

    def is_success(self) -> bool:
        """Return whether it completed without an error."""
        return self.done() and self.exception() is None

    def get_future(self) -> Message:
        """Return the future of its end: the work itself."""
        return self

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())

    is_completed = Future.done
    value = Future.result


@methods_always_eager
class HostWork(_GuardedWork):
    """A collective or a message under way in Gloo.

    Args:
        arrival: The replica's arrival at the operation. Messages have no number in the collective log.
        staging: The host memory that represents the tensors, if there is any.
        limit_s: The program's time limit for each wait, or None.
    """

    _notified = True

    def __init__(
        self,
        communicator: Communicator,
        inner: Any,
        arrival: Arrival,
        staging: Staging | None,
        limit_s: float | None = None,
    ) -> None:
        super().__init__(communicator, inner)
        self.number = arrival.number or None
        self._arrival = arrival
        self._staging = staging
        self._limit_s = limit_s
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._communicator.failed:
            self._communicator.raise_failure()
        activity.begin("collective", self._arrival)
        try:
            self._wait(timeout)
        finally:
            activity.end()
        return True

    def _wait(self, timeout: timedelta | None) -> None:
        communicator = self._communicator
        if _ended(self._inner) is not None:
            if self.number is None:
                communicator.watch(self)
            communicator.limit(self.number or self, self._inner, positive_seconds(timeout) or self._limit_s)
            try:
                self._wait_longer()
            finally:
                communicator.waited()
        communicator.finished(self)
        if self._staging is not None:
            self._staging.copy_back()

    def _wait_longer(self) -> None:
        communicator, inner = self._communicator, self._inner
        while True:
            # A work that ends while its wait times out shows no error when asked again.
            if inner.is_completed() and (error := _ended(inner)) is not None:
                communicator.explain(self.number, error)
            communicator.examine(self.number)
            if _ended(inner) is None:
                return

    def is_completed(self) -> bool:
        if not self._inner.is_completed():
            return self._communicator.failed
        if self._staging is not None and self._inner.is_success():
            self._staging.copy_back()  # later callers need not wait
        return True

    def result(self) -> Any:
        return self._inner.result() if self._staging is None else self._staging.copy_back()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that the work completes and an abort fails, also for waits in C++."""
        if self._future is None:
            devices: list[Any] = list(self._staging.devices) if self._staging else []
            self._root: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
            # torch's set_exception is visible to Python only; an error raised in a callback also reaches C++.
            self._future = self._root.then(self._conclude)
            self._notified = False  # the future is not completed yet
            activity.begin("background", self._arrival, key=id(self))
            self._inner.get_future().add_done_callback(self._inner_done)
            self._communicator.watch(self)
        return self._future

    def _inner_done(self, inner: Any) -> None:
        """Complete the future, with its callbacks, on Gloo's own thread."""
        activity.end(key=id(self))
        try:
            self.conclude()
        finally:
            self._notified = True
            self._communicator.finished(self)

    def conclude(self) -> None:
        """Complete the future, if there is one, with the result or the communicator's failure. Idempotent."""
        if self._future is not None and not self._root.done():
            try:
                self._root.set_result(None)
            except RuntimeError:
                pass  # another thread was faster

    def _conclude(self, root: torch.futures.Future[Any]) -> Any:
        """Return the future's value. Raise the error that ended the work or the communicator."""
        communicator = self._communicator
        if communicator.failed and not self._inner.is_completed():
            communicator.raise_failure(to_program=False)
        failed: RuntimeError | None = None
        try:
            value = self._inner.get_future().value()
        except RuntimeError as error:
            failed = error.with_traceback(None)
        if failed is not None:
            communicator.explain(self.number, failed)
        if self._staging is not None:
            value = self._staging.copy_back()
        communicator.finished(self)
        return value

    def under_way(self) -> bool:
        """Return whether Gloo still works on it, or completes its future."""
        return not self._inner.is_completed() or not self._notified

"""The coordinator: it schedules closures on the workers of a cluster, and returns their results."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from distnb.errors import CheckpointError, ClosureCancelled, NoClusterError, OptionError, RemoteError, ServerLost
from distnb.runtime.interrupts import Interrupts
from distnb.runtime.step_count import Reading
from distnb.servers.closure_messages import Fence
from distnb.servers.coordinator.link import (
    ClosureAbandoned,
    ClosureEnded,
    ClosureReclaimed,
    ClusterLink,
    Event,
    LinkClosed,
    ServerGone,
    ServerUp,
    UserInterrupted,
    WorkerLost,
    WorkerUp,
)
from distnb.servers.coordinator.packer import ClosurePacker, PackedClosure
from distnb.servers.coordinator.per_worker import (
    DatasetMaker,
    PerWorkerDataset,
    PerWorkerValues,
    ValueMaker,
    accepts_context,
    is_function,
)
from distnb.servers.coordinator.pickling import open_value
from distnb.servers.coordinator.queue import Cancel, ClosureQueue, Interrupt, Order, Reclaim, ReportNoWorker, Send
from distnb.servers.coordinator.remote_values import RemoteValue
from distnb.servers.coordinator.sent import Sent
from distnb.servers.coordinator.status import CoordinatorStatus, WorkerState, WorkerStatus
from distnb.servers.coordinator.waiter import Waiter
from distnb.servers.variables import roles
from distnb.servers.variables.here import servers_here
from distnb.story import Transition
from distnb.strategies.parameter_server import ParameterServerStrategy
from distnb.values.structure import flatten, unflatten
from distnb.wire.messages import Reply

__all__ = ["ClusterCoordinator", "running_coordinators", "stories"]

_logger = logging.getLogger("distnb.coordinator")

_DEPTH = 3  # of closures longer than a millisecond: the next one is there, and few wait behind a long one
_LARGE_NBYTES = 64 << 10
_LATEST_STEPS = 256
_END_S = 5.0  # the limit of the wait; the link abandons workers that do not end within a second

_numbers = itertools.count(1)  # of closures, unique in the process: the servers identify changes by them
_coordinators: dict[ParameterServerStrategy, ClusterCoordinator] = {}
_lock = threading.RLock()  # protects the state of all coordinators


@dataclass
class _Closure:
    value: RemoteValue
    packed: PackedClosure
    program: int = 0


class ClusterCoordinator:
    """Scheduler of functions on the workers of a cluster.

    A scheduled function, a *closure*, runs once, on the next free worker. If its worker is lost, another worker runs
    it. The closures of one worker run one after another; closures of several workers end in any order. There is one
    coordinator for each strategy.

    Args:
        strategy: The ParameterServerStrategy that the closures use.
        max_queued: The number of closures that may wait for a worker before `schedule` waits.
        max_queued_nbytes: The memory that their functions and arguments may take.

    Raises:
        OptionError: The strategy is of another kind, or a number is invalid. (It is a ValueError.)
        NoClusterError: No cluster is running.

    Example:
        >>> import distnb
        >>> strategy = distnb.ParameterServerStrategy()                            # doctest: +SKIP
        >>> coordinator = distnb.coordinator.ClusterCoordinator(strategy)          # doctest: +SKIP
        >>> result = coordinator.schedule(lambda x: x + 1, args=(1,))              # doctest: +SKIP
        >>> coordinator.join()                                                     # doctest: +SKIP
        >>> result.fetch()                                                         # doctest: +SKIP
        2
    """

    strategy: ParameterServerStrategy
    reading: Reading | None  # progress of a loop over epochs that schedules here; the loop sets it

    def __new__(
        cls, strategy: ParameterServerStrategy, *, max_queued: int = 4096, max_queued_nbytes: int = 1 << 30
    ) -> ClusterCoordinator:
        if not isinstance(strategy, ParameterServerStrategy):
            raise OptionError(
                f"ClusterCoordinator needs a ParameterServerStrategy; got {strategy!r}. Other strategies run on all "
                "replicas together, and need no coordinator: strategy.run(fn, args)."
            )
        known = _coordinators.get(strategy)
        if known is not None and not known._link.closed:
            return known
        made = super().__new__(cls)
        made._begin(strategy)
        for other in [each for each, old in _coordinators.items() if old._link.closed]:
            del _coordinators[other]
        _coordinators[strategy] = made
        return made

    def __init__(
        self, strategy: ParameterServerStrategy, *, max_queued: int = 4096, max_queued_nbytes: int = 1 << 30
    ) -> None:
        if max_queued < 1 or max_queued_nbytes < 1:
            raise OptionError(
                f"max_queued={max_queued!r}, max_queued_nbytes={max_queued_nbytes!r}: at least one closure must fit."
            )
        self._max_queued = max_queued
        self._max_nbytes = max_queued_nbytes

    def _begin(self, strategy: ParameterServerStrategy) -> None:
        self.strategy = strategy
        self._link: ClusterLink = servers_here.link()
        self._queue = ClosureQueue(_DEPTH if self._link.replicas_per_worker == 1 else 1)
        self._runtime = roles.coordinating(strategy)  # it is the same as long as the link is open
        self._runtime.access.requests.fence = _fence
        self._packer = ClosurePacker(roles.models, self._runtime.access, roles.register)
        self._closures: dict[int, _Closure] = {}
        self._programs: dict[int, tuple[int, int]] = {}  # by program number: the closure, and the worker
        self._sent: dict[int, Sent] = {}  # by worker
        self._lost: dict[int, str] = {}
        self._lost_servers: dict[int, str] = {}
        self._empty_servers: set[int] = set()  # the lost servers that have a replacement
        self._nbytes = 0
        self._errors: list[BaseException] = []  # to be raised, the first one first
        self._why = ""  # the reason for cancellation
        self._interrupted = False
        self._is_current = True  # True if the tensors here have the values after the latest closure
        self._staleness: deque[int] = deque(maxlen=_LATEST_STEPS)
        self._steps = 0
        self.reading = None
        self._waiters: list[Waiter] = []
        self._interrupts = Interrupts()
        self._held = _DeferredInterrupts(self._interrupts, self._end_all)
        self._seed: int | None = None
        self._link.subscribe(self._handle, self._next_deadline)

    # -- scheduling ------------------------------------------------------------------------------------------------

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Queue a function for a worker, and return immediately.

        The function and its arguments are sent in their current state. Among the arguments, also within nested
        structures, per-worker values and iterators become those of the worker that runs the function, and a RemoteValue
        becomes its result, once that is available.

        If too many closures wait (`max_queued`), this call waits, too.

        Args:
            fn: Any callable.
            args: Its positional arguments, a tuple or list.
            kwargs: Its keyword arguments.

        Returns:
            The result, to be fetched.

        Raises:
            BaseException: The error of an earlier closure, once. This closure is then not scheduled.
            OptionError: The arguments are not a tuple and a dict, or `fn` is not callable. (It is a ValueError.)
            CannotTravelError: Something in it cannot be sent.
        """
        if not callable(fn):
            raise OptionError(f"schedule needs a function; got {fn!r}.")
        if args is not None and not isinstance(args, (tuple, list)):
            raise OptionError(f"args must be a tuple or list; got {args!r}. For one argument write args=(value,).")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise OptionError(f"kwargs must be a dict of keyword arguments; got {kwargs!r}.")
        if self._must_raise:
            with self._held:
                self._raise_error()
        self._runtime.registration.register_made()
        packed = self._packer.pack(fn, tuple(args or ()), dict(kwargs or {}), at_rest=self._queue.idle)
        with self._held:
            while True:
                if self._full():
                    self._await(lambda: self._has_room() or self._must_raise)
                with _lock:
                    # An error that has arrived since the first check has cancelled all closures, and would not cancel
                    # this one: its own error would be raised later, when the first error's cause may be mended.
                    if not self._must_raise:
                        return self._enter(fn, packed)
                self._raise_error()

    def _enter(self, fn: Callable[..., Any], packed: PackedClosure) -> RemoteValue:
        self._link.watch(self)
        number = next(_numbers)
        value = RemoteValue(number, getattr(fn, "__qualname__", None) or type(fn).__qualname__, self._await_result)
        for each in packed.inputs:
            if each.state in ("failed", "cancelled"):
                text = f"{value.name} was not run: an argument is the result of {each.name}, which has {each.state}."
                value.fail(ClosureCancelled(text), "cancelled")
                return value
        self._closures[number] = _Closure(value, packed)
        self._is_current = False
        self._nbytes += packed.nbytes
        after = [each.number for each in packed.inputs if not each.ended] if packed.inputs else ()
        is_large = packed.nbytes > _LARGE_NBYTES
        self._carry_out(self._queue.scheduled(number, time.monotonic(), after, is_large=is_large))
        return value

    def _full(self) -> bool:
        queued = self._queue.queued
        return queued >= self._max_queued or (queued > 0 and self._nbytes > self._max_nbytes)

    def _has_room(self) -> bool:
        """Return whether several closures fit. Waking the caller for each closure would cost more than it gains."""
        queued = self._queue.queued
        return queued <= self._max_queued * 7 // 8 and (not queued or self._nbytes <= self._max_nbytes)

    def join(self) -> None:
        """Wait until every scheduled closure has ended. Then models here have the current parameters.

        Raises:
            BaseException: The error of a closure, once. All unfinished closures are cancelled.
            KeyboardInterrupt: The user interrupted: all closures are cancelled.
        """
        with self._held:
            self._await(lambda: self._queue.idle or self._must_raise)
            self._raise_error()
        self._link.catch_up()
        self._catch_up(self._runtime.access.copies.fetch_changes)

    def done(self) -> bool:
        """Return whether every scheduled closure has ended.

        Raises:
            BaseException: The error of a closure, once.
        """
        with self._held:
            self._raise_error()
            idle = self._queue.idle
        self._update_if_idle()
        return idle

    def fetch(self, val: Any) -> Any:
        """Wait for results, and return them. If nothing else is running, models here then have the current parameters.

        Args:
            val: A RemoteValue, or a nested structure of them and of other values, which are returned unchanged.

        Returns:
            The same structure of results.

        Raises:
            BaseException: The error of one of the closures, at each call.
            ClosureCancelled: One of them was cancelled before it had a result.
        """
        leaves, shape = flatten(val)
        numbers = [each.number for each in leaves if isinstance(each, RemoteValue)]
        if len(numbers) > 1:  # one wait for all: to wake a thread costs as much as a small closure
            unfinished = self._closures.keys()
            self._await_result(lambda: unfinished.isdisjoint(numbers) or self._must_raise)
        return unflatten(shape, map(_fetched, leaves))

    def wait(self, values: Sequence[RemoteValue], left: int) -> None:
        """Wait until at most `left` of these results are outstanding, or a closure has raised.

        Raises:
            KeyboardInterrupt: The user interrupted: all closures are cancelled.
        """
        self._await_held(lambda: sum(not each.ended for each in values) <= left or self._must_raise)

    def forget(self, obj: Any) -> None:
        """Send a model to workers again, because more than its values has changed. No scheduled closure uses it."""
        self._packer.forget(obj)

    def recover(self, checkpoint: Any) -> None:
        """Continue after a parameter server was lost and replaced (`%distnb restart --missing`).

        Variables and optimizers that were on it are created again, and all are restored, so that they are consistent.
        The closures that were scheduled when it was lost have been cancelled.

        Args:
            checkpoint: A `CheckpointManager`, whose newest complete checkpoint is restored; or a function that
                restores.

        Raises:
            ServerLost: A server is still missing.
            CheckpointError: There is no checkpoint, or it does not match. Call this again with another one.
        """
        with _lock:
            missing = sorted(self._lost_servers.keys() - self._empty_servers)
            filled = {server: self._link.servers.generation(server) for server in sorted(self._empty_servers)}
        if missing:
            raise ServerLost(self._server_text(missing[0]))
        for each in running_coordinators():
            each._await_held(each._have_ended)  # a closure that still runs would change the restored values
        access = self._runtime.access
        for server in filled:
            access.recreate(server)
        access.copies.refresh_tensors()
        restored = getattr(checkpoint, "restore_or_initialize", None)
        if restored is not None and restored() is None:
            raise CheckpointError(f"{checkpoint!r} has no checkpoint to restore variables from.")
        if restored is None:
            checkpoint()
        access.copies.fetch_changes()
        with _lock:
            for server, generation in filled.items():
                if server in self._empty_servers and self._link.servers.generation(server) == generation:
                    self._empty_servers.discard(server)
                    del self._lost_servers[server]
            self._errors.clear()

    # -- per-worker values -----------------------------------------------------------------------------------------

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Create a dataset on each worker.

        Each worker, and each replacement of a lost one, makes its own dataset when a closure first uses it. `iter` of
        the returned object returns a reference to an iterator on each worker, for `schedule`.

        Datasets should be shuffled and endless. Workers draw different random numbers, so each shuffles differently.

        Args:
            dataset_fn: A function that returns a dataset (a DataLoader or any iterable). It takes no argument, or an
                `InputContext` with one pipeline for each worker. A dataset itself is sent to the workers.
        """
        if is_function(dataset_fn):
            accepts_context(dataset_fn)
        elif not hasattr(dataset_fn, "__iter__") and not hasattr(dataset_fn, "__getitem__"):
            raise OptionError(f"A per-worker dataset needs a function or a dataset; got {dataset_fn!r}.")
        replicas = self.strategy.num_replicas_in_sync
        made = DatasetMaker(dataset_fn, len(self._link.workers), replicas)
        return PerWorkerDataset(made, _name_of(dataset_fn))

    def create_per_worker_value(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Create a value on each worker, which makes it when a closure first uses it.

        Args:
            fn: A function without arguments that returns the value.
        """
        if not callable(fn):
            raise OptionError(f"A per-worker value needs a function without arguments; got {fn!r}.")
        return PerWorkerValues(ValueMaker(fn), _name_of(fn))

    # -- status ----------------------------------------------------------------------------------------------------

    def status(self) -> CoordinatorStatus:
        """Return a snapshot of the current state. Cheap, from any thread, and without a message to a worker."""
        now = time.monotonic()
        with _lock:
            workers = []
            states = self._queue.workers
            for worker in self._link.workers:
                found = states.get(worker)
                done = self._queue.done_by[worker]
                if found is None:
                    how = self._lost.get(worker, "not there yet")
                    workers.append(WorkerStatus(worker=worker, state="lost", done=done, how=how))
                    continue
                closure = self._closures.get(found.closure) if found.closure is not None else None
                name, seconds = (closure.value.name, now - found.began) if closure else ("", 0.0)
                state: WorkerState = "stuck" if found.stuck else "running" if closure else "idle"
                workers.append(WorkerStatus(worker=worker, state=state, closure=name, seconds=seconds, done=done))
            stale = tuple(self._staleness)
            return CoordinatorStatus(
                **self._queue.counts._asdict(),
                workers=tuple(workers),
                mean_staleness=sum(stale) / len(stale) if stale else 0.0,
                max_staleness=max(stale, default=0),
                lost_servers=tuple(sorted(self._lost_servers)),
                steps=self._steps,
                replicas_per_worker=self._link.replicas_per_worker,
                reading=self.reading,
            )

    def __repr__(self) -> str:
        counts = self._queue.counts
        shown = ", ".join(f"{number} {name}" for name, number in counts._asdict().items() if number)
        return f"<ClusterCoordinator of {len(self._link.workers)} workers: {shown or 'nothing scheduled yet'}>"

    # -- waiting, and raising errors -------------------------------------------------------------------------------

    @property
    def _must_raise(self) -> bool:
        return bool(self._errors or self._lost_servers) or self._interrupted or self._link.closed

    def _await_held(self, ready: Callable[[], bool]) -> None:
        with self._held:
            self._await(ready)

    def _have_ended(self) -> bool:
        """Return whether the closures that were ordered to end have ended."""
        return not self._queue.ending

    def _await_result(self, ready: Callable[[], bool]) -> None:
        if not ready():
            self._await_held(ready)
        self._update_if_idle()

    def _update_if_idle(self) -> None:
        """Update the tensors here once everything has ended, because the user continues from the values seen here.

        Changes in place then apply to the servers' current values. While closures run, they apply to the values read
        last, and the servers add the closures' changes.
        """
        if self._is_current or not self._queue.idle or self._lost_servers or self._link.closed:
            return
        with suppress(ServerLost, NoClusterError):
            self._catch_up(self._runtime.access.copies.refresh_tensors)

    def _catch_up(self, refresh: Callable[[], None]) -> None:
        self._is_current = True  # unless another thread schedules something in the meantime
        try:
            refresh()
        except BaseException:
            self._is_current = False
            raise

    def _await(self, ready: Callable[[], bool]) -> None:
        """Wait for a condition. On an interrupt, end everything and raise KeyboardInterrupt."""
        with _lock:
            if ready():
                return
            self._link.watch(self)
            waiter = Waiter(ready)
            self._waiters.append(waiter)
        on_main = threading.current_thread() is threading.main_thread()
        try:
            while not waiter.wait(self._interrupts.fd if on_main else None):
                if self._interrupts.pop():
                    self._end_all()
                    raise KeyboardInterrupt
        finally:
            with _lock:
                self._waiters.remove(waiter)
            waiter.close()

    def _end_all(self) -> None:
        """Cancel everything after an interrupt, and wait until the workers have ended or abandoned their closures."""
        with _lock:
            self._cancel("the user interrupted")
            self._wake()
            waiter = Waiter(self._have_ended)
            self._waiters.append(waiter)
        waiter.wait_for(_END_S)
        with _lock:
            self._waiters.remove(waiter)
            self._interrupted = False
        waiter.close()

    def _cancel(self, why: str) -> None:
        self._why = why
        self._carry_out(self._queue.cancel(time.monotonic()))

    def _raise_error(self) -> None:
        """Raise the closures' errors, once. Raise the loss of a server or of the cluster as long as it lasts."""
        if not self._must_raise:
            return
        self._await(self._have_ended)
        with _lock:
            errors, self._errors = self._errors, []
            interrupted, self._interrupted = self._interrupted, False
        if interrupted:
            raise KeyboardInterrupt
        if self._lost_servers:
            # A closure on a worker may notice the loss first, or report it after the replacement has started. The
            # error below says what has become of the server since.
            errors = [each for each in errors if not isinstance(each, ServerLost)]
        if errors:
            self._link.catch_up()
            self._update_if_idle()
            first, *others = errors
            for other in others:
                first.add_note(f"(Another closure failed, too: {type(other).__name__}: {other})")
            try:
                first.others = tuple(others)  # type: ignore[attr-defined]
            except AttributeError:
                pass  # the class has slots; the notes name the other errors
            raise first.with_traceback(None)
        if self._link.closed:
            raise NoClusterError(
                "The cluster of this coordinator was stopped. Start one with %distnb start --workers 2 --ps 1, or "
                "distnb.start(workers=2, ps=1), and create the strategy and the coordinator again."
            )
        if self._lost_servers:
            raise ServerLost(self._server_text(next(iter(self._lost_servers))))

    def _server_text(self, server: int) -> str:
        how = self._lost_servers[server]
        if server in self._empty_servers:
            return (
                f"Parameter server {server} {how}. Its replacement is empty. Restore the variables from a checkpoint: "
                "coordinator.recover(checkpoint_manager)."
            )
        return (
            f"Parameter server {server} {how}, and its variables are lost. Start a replacement with "
            "%distnb restart --missing, and restore the variables from a checkpoint: "
            "coordinator.recover(checkpoint_manager)."
        )

    # -- the link's thread -----------------------------------------------------------------------------------------

    def _next_deadline(self) -> float | None:
        with _lock:
            return self._queue.next_deadline()

    def _handle(self, event: Event | None) -> None:
        """Handle one event; None: a deadline has passed."""
        now = time.monotonic()
        with _lock:
            if event is not None and _logger.isEnabledFor(logging.DEBUG):
                _logger.debug("received %s", type(event).__name__)
            try:
                self._carry_out(self._after(event, now))
            except Exception as error:
                _logger.exception("the event %s could not be handled", type(event).__name__)
                self._errors.append(error)
                self._why = f"an event could not be handled ({type(error).__name__}: {_line(str(error))})"
                self._carry_out(self._queue.cancel(now))
            self._wake()

    def _after(self, event: Event | None, now: float) -> list[Order]:
        queue = self._queue
        match event:
            case ClosureEnded():
                return self._ended(event, now)
            case ClosureReclaimed(program=program):
                number, worker = self._programs.pop(program, (None, 0))
                return [] if number is None else queue.reclaimed(worker, number, now)
            case ClosureAbandoned(program=program, reply=reply):
                number, worker = self._programs.get(program, (None, 0))  # its reply may still arrive
                if number is None:
                    return []
                orders: list[Order] = []
                if reply is not None and number in self._closures:
                    self._errors.append(self._error_of(reply, worker, self._closures[number].value.name))
                    orders = queue.cancel(now)
                return orders + queue.abandoned(worker, number, now)
            case WorkerUp(worker=worker):
                _logger.info("worker %d is up", worker)
                self._forget_worker(worker)
                self._lost.pop(worker, None)
                self._sent[worker] = Sent()
                return queue.worker_up(worker, now)
            case WorkerLost(worker=worker, how=how):
                _logger.warning("worker %d %s", worker, how)
                self._forget_worker(worker)
                self._lost[worker] = how
                return queue.worker_lost(worker, now)
            case ServerGone(server=server, how=how):
                _logger.warning("parameter server %d %s", server, how)
                self._lost_servers.setdefault(server, how)
                self._empty_servers.discard(server)
                self._why = self._server_text(server)
                return queue.cancel(now)
            case ServerUp(server=server):
                self._empty_servers.add(server)
            case UserInterrupted():
                self._interrupted = bool(self._waiters)
                self._why = "the user interrupted"
                return queue.cancel(now)
            case LinkClosed():
                self._why = "the cluster was stopped"
                orders = queue.cancel(now)
                for worker in self._link.workers:
                    orders += queue.worker_lost(worker, now)
                return [order for order in orders if isinstance(order, Cancel)]
            case None:
                return queue.tick(now)
        return []

    def _ended(self, event: ClosureEnded, now: float) -> list[Order]:
        worker, reply, others = event
        number, _ = self._programs.pop(reply.program, (None, 0))
        if number is None:
            return []
        closure = self._closures.get(number)
        if closure is None or closure.program != reply.program:  # it was abandoned
            return self._queue.ended(worker, number, "cancelled", now)
        name = closure.value.name
        if reply.status == "ok":
            self._forget(number)
            try:
                for each in (reply, *others):
                    if each.value.contributions is not None:
                        self._packer.merge(each.value.contributions)
            except Exception as refusal:  # noqa: BLE001 - a metric's own code
                refusal.add_note(f"The counts of {name} on worker {worker} could not be added to the metric.")
                if not self._queue.ending:
                    self._why = f"the counts of {name} could not be added to a metric"
                return self._failed(closure, worker, number, refusal, now)
            self._staleness.extend(reply.value.staleness)
            self._steps += len(reply.value.staleness)
            closure.value.resolve(reply.value.value, open_value)
            return self._queue.ended(worker, number, "done", now)
        if reply.status == "aborted" and self._queue.is_reclaiming(worker, number):
            # This reply arrived before `ClosureReclaimed`.
            return self._queue.reclaimed(worker, number, now)
        if reply.status != "error" or reply.error is None:
            if not self._queue.ending:
                self._why = "its worker was ordered to end it"
            return self._queue.ended(worker, number, "cancelled", now)
        error = self._error_of(reply, worker, name)
        self._forget(number)
        return self._failed(closure, worker, number, error, now)

    def _failed(self, closure: _Closure, worker: int, number: int, error: BaseException, now: float) -> list[Order]:
        closure.value.fail(error, "failed")
        self._errors.append(error)
        return self._queue.ended(worker, number, "failed", now)

    def _error_of(self, reply: Reply, worker: int, name: str) -> BaseException:
        """Return the error of a closure, which is the reason for cancelling the others."""
        report = reply.error
        assert report is not None
        if not self._queue.ending:
            self._why = f"{name} failed on worker {worker} ({report.type_name}: {_line(report.text)})"
        try:
            return self._link.error(report, worker, name)
        except Exception as failed:  # noqa: BLE001 - the class of the exception is the user's
            error = RemoteError(f"{report.type_name}: {report.text}")
            error.add_note(f"The exception could not be shown: {type(failed).__name__}: {failed}")
            return error

    def _forget_worker(self, worker: int) -> None:
        self._programs = {program: each for program, each in self._programs.items() if each[1] != worker}
        for closure in self._queue.has(worker):
            self._closures[closure].value.state = "waiting"

    def _forget(self, number: int) -> _Closure:
        closure = self._closures.pop(number)
        self._nbytes -= closure.packed.nbytes
        return closure

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.check()

    # -- carrying out orders -------------------------------------------------------------------------------------

    def _carry_out(self, orders: Sequence[Order]) -> None:
        pending = deque(orders) if orders else ()
        while pending:
            order = pending.popleft()
            if isinstance(order, Send):
                pending += self._send(order)
            elif isinstance(order, Cancel):
                value = self._forget(order.closure).value
                text = f"{value.name} was cancelled before it had a result: {self._why}"
                value.fail(ClosureCancelled(text if text.endswith(".") else f"{text}."), "cancelled")
            elif isinstance(order, Interrupt):
                self._link.interrupt(self._closures[order.closure].program)
            elif isinstance(order, Reclaim):
                self._link.reclaim(order.worker, self._closures[order.closure].program)
            elif isinstance(order, ReportNoWorker):
                print(f"distnb: {self._no_worker_text()}", file=sys.stderr)

    def _send(self, order: Send) -> list[Order]:
        """Send a closure. If that fails, as when a local module's file cannot be read, the closure has failed.

        Returns:
            The orders that follow from a failure.
        """
        number, worker = order
        closure, sent = self._closures[number], self._sent[worker]
        seed = functools.partial(self._seed_of, worker)
        closure.program = program = self._link.number()
        try:
            message = sent.message(program, number, _fence(), closure.packed, self._packer, seed)
            self._link.send(worker, message)
        except Exception as error:  # noqa: BLE001 - of the file system or the link
            error.add_note(f"{closure.value.name} could not be sent to worker {worker}.")
            self._sent[worker] = Sent(seeded=sent.seeded)  # what it has received is unknown
            if not self._queue.ending:
                self._why = f"{closure.value.name} could not be sent"
            return self._failed(self._forget(number), worker, number, error, time.monotonic())
        closure.value.state = "running"
        self._programs[program] = (number, worker)
        return []

    def _seed_of(self, worker: int) -> int:
        """Return the seed of a worker. Each worker draws different numbers, all determined by the seed set here.

        The random numbers of this process continue as if nothing had been scheduled.
        """
        if self._seed is None:
            import torch

            with torch.random.fork_rng(devices=[]):
                self._seed = int(torch.randint(1 << 62, ()))
        return random.Random(f"{self._seed} {worker}").getrandbits(63)

    def _no_worker_text(self) -> str:
        stuck = [str(worker) for worker, state in self._queue.workers.items() if state.stuck]
        if stuck:
            return (
                f"closures wait: worker {', '.join(stuck)} is busy with one that was cancelled, and there is no other "
                "worker. Restart it with %distnb restart."
            )
        return (
            "closures wait, but no worker is there to run them. They continue when one starts: start the missing "
            "workers with %distnb restart --missing, or distnb.Cluster.restart(missing=True)."
        )


class _DeferredInterrupts:
    """A context that defers SIGINT while the state is read and changed, and raises KeyboardInterrupt at its end.

    In other threads than the main thread it changes nothing, because Python handles SIGINT only there.

    Args:
        interrupts: The interrupts of the main thread.
        end_all: Cancels everything after an interrupt.
    """

    def __init__(self, interrupts: Interrupts, end_all: Callable[[], None]) -> None:
        self._interrupts = interrupts
        self._end_all = end_all
        self._main = threading.main_thread().ident

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._interrupts.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if threading.get_ident() != self._main:
            return
        if kind is None and self._interrupts.count and self._interrupts.pop():
            try:
                self._end_all()
            finally:
                self._interrupts.__exit__(KeyboardInterrupt, None, None)
            raise KeyboardInterrupt
        self._interrupts.__exit__(kind, error, traceback)


def _fence() -> Fence:
    """Return the closures of all coordinators that have ended.

    Every request to a server carries these numbers. After a closure is cancelled, the first request of the coordinator
    or of a later closure to a server makes the server refuse the cancelled closure's changes. Nobody can therefore see
    a value that still changes.
    """
    with _lock:
        if len(_coordinators) == 1:
            (only,) = _coordinators.values()
            oldest = only._queue.oldest
            astray = only._queue.astray(oldest)
            return Fence(oldest, tuple(sorted(astray)) if astray else ())
        queues = [each._queue for each in _coordinators.values()]
        running = [queue.oldest for queue in queues if not queue.idle]
        oldest = min(running) if running else max(queue.oldest for queue in queues)
        astray = {closure for queue in queues for closure in queue.astray(oldest)}
    return Fence(oldest, tuple(sorted(astray)))


def running_coordinators() -> list[ClusterCoordinator]:
    """Return the coordinators whose clusters have not been stopped."""
    return [each for each in tuple(_coordinators.values()) if not each._link.closed]


def stories() -> dict[str, list[Transition]]:
    """Return the latest transitions of each coordinator's queue, the oldest first, by a name for a bug report."""
    with _lock:
        return {f"closures-{place}": each._queue.story for place, each in enumerate(_coordinators.values())}


def _fetched(value: Any) -> Any:
    if isinstance(value, PerWorkerValues):
        raise OptionError(
            f"fetch got {value!r}, but each worker has its own value. Fetch the result of a closure instead: "
            "coordinator.fetch(coordinator.schedule(lambda value: value, args=(per_worker,)))."
        )
    return value.fetch() if isinstance(value, RemoteValue) else value


def _line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__

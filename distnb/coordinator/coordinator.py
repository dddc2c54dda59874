"""The coordinator: it schedules closures on the workers of a cluster, and gives their results."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from distnb.coordinator.link import (
    ClosureEnded,
    ClosureGivenBack,
    ClosureGivenUp,
    ClusterLink,
    Event,
    LinkClosed,
    ServerGone,
    ServerUp,
    UserInterrupted,
    WorkerLost,
    WorkerUp,
)
from distnb.coordinator.packer import ClosurePacker, PackedClosure
from distnb.coordinator.per_worker import (
    MakeDataset,
    MakeValue,
    PerWorkerDataset,
    PerWorkerValues,
    is_function,
    takes_context,
)
from distnb.coordinator.pickling import open_value
from distnb.coordinator.queue import Cancel, ClosureQueue, Interrupt, Order, Reclaim, ReportNoWorker, Send
from distnb.coordinator.remote_values import RemoteValue
from distnb.coordinator.sent import Sent
from distnb.coordinator.status import CoordinatorStatus, WorkerState, WorkerStatus
from distnb.coordinator.waiter import Waiter
from distnb.errors import CheckpointError, ClosureCancelled, NoClusterError, OptionError, ServerLost
from distnb.runtime.interrupts import Interrupts
from distnb.runtime.servers import roles
from distnb.runtime.servers.here import servers_here
from distnb.runtime.step_count import Reading
from distnb.story import Transition
from distnb.strategies.base import Strategy
from distnb.values.structure import map_structure
from distnb.wire.closure_messages import Fence
from distnb.wire.messages import Reply

__all__ = ["ClusterCoordinator", "running_coordinators", "stories"]

_logger = logging.getLogger("distnb.coordinator")

_DEPTH = 3  # of empty closures two workers do 1.5 times as many as with 1, and 1.3 times as many as with 2
_LATEST_STEPS = 256
_END_S = 5.0  # workers that do not end in a second are given up on; longer than this, nobody waits

_numbers = itertools.count(1)  # of closures: the servers know changes by them, whoever scheduled
_coordinators: dict[Strategy, ClusterCoordinator] = {}
_lock = threading.RLock()  # of all coordinators' state


@dataclass
class _Closure:
    value: RemoteValue
    packed: PackedClosure
    program: int = 0


class ClusterCoordinator:
    """Schedules functions on the workers of a cluster, and coordinates their results.

    A scheduled function, a *closure*, runs on the next worker that is free, at some time, once: when its worker is
    lost, another one runs it. Closures of one worker run one after another; nothing is said about the order in which
    those of several workers end. There is one coordinator for each strategy.

    Args:
        strategy: The ParameterServerStrategy that the closures use.
        max_queued: How many closures may wait for a worker; `schedule` waits when so many do.
        max_queued_nbytes: How much memory their functions and arguments may take.

    Raises:
        OptionError: The strategy is of another kind, or a number makes no sense. (It is a ValueError.)
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

    strategy: Strategy
    reading: Reading | None  # how far a loop over epochs has come that schedules here: set by who has one

    def __new__(
        cls, strategy: Strategy, *, max_queued: int = 4096, max_queued_nbytes: int = 1 << 30
    ) -> ClusterCoordinator:
        if not isinstance(strategy, Strategy) or not strategy.has_coordinator:
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

    def __init__(self, strategy: Strategy, *, max_queued: int = 4096, max_queued_nbytes: int = 1 << 30) -> None:
        if max_queued < 1 or max_queued_nbytes < 1:
            raise OptionError(
                f"max_queued={max_queued!r}, max_queued_nbytes={max_queued_nbytes!r}: at least one closure must fit."
            )
        self._max_queued = max_queued
        self._max_nbytes = max_queued_nbytes

    def _begin(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._link: ClusterLink = servers_here.link()
        self._queue = ClosureQueue(_DEPTH if self._link.replicas_per_worker == 1 else 1)
        runtime = roles.coordinating(strategy)
        runtime.access.fence = _fence
        self._packer = ClosurePacker(roles.models, runtime.access)
        self._closures: dict[int, _Closure] = {}
        self._programs: dict[int, tuple[int, int]] = {}  # by number: the closure, and the worker
        self._sent: dict[int, Sent] = {}  # by worker
        self._lost: dict[int, str] = {}
        self._lost_servers: dict[int, str] = {}
        self._empty_servers: set[int] = set()  # of those, they have come back
        self._nbytes = 0
        self._errors: list[BaseException] = []  # to be raised, the first first
        self._why = ""  # those that are cancelled are
        self._interrupted = False
        self._is_current = True  # whether the tensors here are those of the latest closure
        self._staleness: deque[int] = deque(maxlen=_LATEST_STEPS)
        self._steps = 0
        self.reading = None
        self._waiters: list[Waiter] = []
        self._interrupts = Interrupts()
        self._seed: int | None = None
        self._link.subscribe(self._handle, self._next_deadline)

    # -- scheduling ------------------------------------------------------------------------------------------------

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Queue a function for a worker, and return at once.

        Function and arguments are sent as they are now. Among the arguments, also within nested structures, per-worker
        values and iterators become those of the worker that runs the function, and a RemoteValue becomes the result
        that it stands for, once that is there.

        When too many closures wait, this waits (`max_queued`).

        Args:
            fn: Any callable.
            args: Its positional arguments, a tuple or list.
            kwargs: Its keyword arguments.

        Returns:
            What stands for the result.

        Raises:
            BaseException: What an earlier closure raised, once; then this one is not scheduled.
            OptionError: The arguments are no tuple and dict, or `fn` is not callable. (It is a ValueError.)
            CannotTravelError: Something in it cannot be sent.
        """
        if not callable(fn):
            raise OptionError(f"schedule needs a function; got {fn!r}.")
        if args is not None and not isinstance(args, (tuple, list)):
            raise OptionError(f"args is a tuple or list of arguments; got {args!r}. One argument: args=(value,).")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise OptionError(f"kwargs is a dict of keyword arguments; got {kwargs!r}.")
        with self._held():
            self._raise_error()
        roles.coordinating(self.strategy).registration.take_made()
        packed = self._packer.pack(fn, tuple(args or ()), dict(kwargs or {}), at_rest=self._queue.idle)
        with self._held():
            if self._full():
                self._await(lambda: self._roomy() or self._trouble)
                self._raise_error()
            with _lock:
                return self._enter(fn, packed)

    def _enter(self, fn: Callable[..., Any], packed: PackedClosure) -> RemoteValue:
        self._link.watch(self)
        number = next(_numbers)
        value = RemoteValue(number, getattr(fn, "__qualname__", None) or type(fn).__qualname__, self._await_result)
        for each in packed.inputs:
            if each.state in ("failed", "cancelled"):
                text = f"{value.name} was not run: an argument is the result of {each.name}, which has {each.state}."
                value.spoil(ClosureCancelled(text), "cancelled")
                return value
        self._closures[number] = _Closure(value, packed)
        self._is_current = False
        self._nbytes += packed.nbytes
        after = [each.number for each in packed.inputs if not each.ended]
        self._carry_out(self._queue.scheduled(number, time.monotonic(), after))
        return value

    def _full(self) -> bool:
        queued = self._queue.queued
        return queued >= self._max_queued or (queued > 0 and self._nbytes > self._max_nbytes)

    def _roomy(self) -> bool:
        """Return whether several closures fit at once: one wake-up for each would cost more than it gains."""
        queued = self._queue.queued
        return queued <= self._max_queued * 7 // 8 and (not queued or self._nbytes <= self._max_nbytes)

    def join(self) -> None:
        """Wait until every scheduled closure has ended. Then the parameters of models here are those of now.

        Raises:
            BaseException: What a closure raised, once. Those that had not ended then are cancelled.
            KeyboardInterrupt: The user interrupted: all are cancelled.
        """
        with self._held():
            self._await(lambda: self._queue.idle or self._trouble)
            self._raise_error()
        self._link.catch_up()
        self._catch_up(roles.coordinating(self.strategy).access.fetch_changes)

    def done(self) -> bool:
        """Return whether every scheduled closure has ended.

        Raises:
            BaseException: What a closure raised, once.
        """
        with self._held():
            self._raise_error()
            idle = self._queue.idle
        self._come_to_rest()
        return idle

    def fetch(self, val: Any) -> Any:
        """Wait for results, and return them. If nothing else is under way, models here have the parameters of now.

        Args:
            val: A RemoteValue, or a nested structure of them and of other values, which stay as they are.

        Returns:
            The same structure of results.

        Raises:
            BaseException: What one of the closures raised; each time.
            ClosureCancelled: One of them was ended before it had a result.
        """
        return map_structure(_fetched, val)

    def wait(self, values: Sequence[RemoteValue], left: int) -> None:
        """Wait until at most so many of these results have not come yet, or a closure has raised.

        Raises:
            KeyboardInterrupt: The user interrupted: all are cancelled.
        """
        self._await_held(lambda: sum(not each.ended for each in values) <= left or self._trouble)

    def forget(self, obj: Any) -> None:
        """Send a model to workers again: more has changed than its values. No closure that uses it is scheduled."""
        self._packer.forget(obj)

    def recover(self, checkpoint: Any) -> None:
        """Go on after a parameter server was lost, once another one is in its place (`%distnb restart --missing`).

        Variables and optimizers that were on it are made again, and all are restored, so that they fit together. What
        was scheduled when it was lost was cancelled.

        Args:
            checkpoint: A `CheckpointManager`, whose newest whole checkpoint is restored; or a function that restores.

        Raises:
            ServerLost: A server is still missing.
            CheckpointError: There is no checkpoint, or it does not fit. Call this again with another one.
        """
        with _lock:
            missing = sorted(self._lost_servers.keys() - self._empty_servers)
            filled = {server: self._link.servers.generation(server) for server in sorted(self._empty_servers)}
        if missing:
            raise ServerLost(self._server_text(missing[0]))
        for each in running_coordinators():
            each._await_held(each._have_ended)  # what still runs would change what is restored
        runtime = roles.coordinating(self.strategy)
        for server in filled:
            runtime.access.recreate(server)
        runtime.access.refresh_tensors()
        restored = getattr(checkpoint, "restore_or_initialize", None)
        if restored is not None and restored() is None:
            raise CheckpointError(f"{checkpoint!r} has no checkpoint yet, from which variables could be restored.")
        if restored is None:
            checkpoint()
        runtime.access.fetch_changes()
        with _lock:
            for server, generation in filled.items():
                if server in self._empty_servers and self._link.servers.generation(server) == generation:
                    self._empty_servers.discard(server)
                    del self._lost_servers[server]
            self._errors.clear()

    # -- what each worker has of its own ---------------------------------------------------------------------------

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Make a dataset on each worker.

        Each worker makes its own when a closure first uses it, and so does one that takes a lost worker's place.
        `iter` of what is returned stands for an iterator on each worker, to be passed to `schedule`.

        Datasets are best shuffled and endless. Workers draw different random numbers, so each shuffles in its own way.

        Args:
            dataset_fn: A function without arguments, or of an `InputContext` (one pipeline for each worker), that
                returns a dataset: a DataLoader, or anything that can be iterated. Or a dataset, which is sent.
        """
        if is_function(dataset_fn):
            takes_context(dataset_fn)
        elif not hasattr(dataset_fn, "__iter__") and not hasattr(dataset_fn, "__getitem__"):
            raise OptionError(f"A per-worker dataset is made of a function or a dataset; got {dataset_fn!r}.")
        replicas = self.strategy.num_replicas_in_sync
        made = MakeDataset(dataset_fn, len(self._link.workers), replicas)
        return PerWorkerDataset(made, _name_of(dataset_fn))

    def create_per_worker_value(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Make a value on each worker, when a closure first uses it there.

        Args:
            fn: A function without arguments.
        """
        if not callable(fn):
            raise OptionError(f"A per-worker value is made by a function without arguments; got {fn!r}.")
        return PerWorkerValues(MakeValue(fn), _name_of(fn))

    # -- being looked at -------------------------------------------------------------------------------------------

    def status(self) -> CoordinatorStatus:
        """Return the current state. This is cheap, works on any thread, and asks no worker."""
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

    # -- waiting, and what is raised -------------------------------------------------------------------------------

    @property
    def _trouble(self) -> bool:
        return bool(self._errors or self._lost_servers) or self._interrupted or self._link.closed

    @contextmanager
    def _held(self) -> Iterator[None]:
        """SIGINT is noted, and not raised, while the state is looked at and changed; at the end it is."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with self._interrupts:
            yield
            if self._interrupts.take():
                self._end_all()
                raise KeyboardInterrupt

    def _await_held(self, ready: Callable[[], bool]) -> None:
        with self._held():
            self._await(ready)

    def _have_ended(self) -> bool:
        """Return whether the closures that were ordered to end have ended."""
        return not self._queue.ending

    def _await_result(self, ready: Callable[[], bool]) -> None:
        if not ready():
            self._await_held(ready)
        self._come_to_rest()

    def _come_to_rest(self) -> None:
        """Bring the tensors here up to date once all has ended: the user goes on from what is seen here.

        What is changed in place is then a change of what the servers hold. While closures are under way it is a change
        of what was read last, and what the closures change is added to it.
        """
        if self._is_current or not self._queue.idle or self._lost_servers or self._link.closed:
            return
        with suppress(ServerLost, NoClusterError):
            self._catch_up(roles.coordinating(self.strategy).access.refresh_tensors)

    def _catch_up(self, refresh: Callable[[], None]) -> None:
        self._is_current = True  # unless another thread schedules something meanwhile
        try:
            refresh()
        except BaseException:
            self._is_current = False
            raise

    def _await(self, ready: Callable[[], bool]) -> None:
        """Wait for a condition. KeyboardInterrupt: the user interrupted, and everything was ended."""
        with _lock:
            if ready():
                return
            self._link.watch(self)
            waiter = Waiter(ready)
            self._waiters.append(waiter)
        on_main = threading.current_thread() is threading.main_thread()
        try:
            while not waiter.wait(self._interrupts.fd if on_main else None):
                if self._interrupts.take():
                    self._end_all()
                    raise KeyboardInterrupt
        finally:
            with _lock:
                self._waiters.remove(waiter)
            waiter.close()

    def _end_all(self) -> None:
        """Cancel everything for the user's interrupt, and wait until the workers have followed or are given up on."""
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
        """Raise what closures have raised, once; and that a server or the cluster is gone, as long as it is."""
        if not self._trouble:
            return
        self._await(self._have_ended)
        with _lock:
            errors, self._errors = self._errors, []
            interrupted, self._interrupted = self._interrupted, False
        if interrupted:
            raise KeyboardInterrupt
        if errors:
            self._link.catch_up()
            self._come_to_rest()
            first, *others = errors
            for other in others:
                first.add_note(f"(another closure failed, too: {type(other).__name__}: {other})")
            try:
                first.others = tuple(others)  # type: ignore[attr-defined]
            except AttributeError:
                pass  # a class with slots; the notes have the text
            raise first.with_traceback(None)
        if self._link.closed:
            raise NoClusterError(
                "The cluster of this coordinator was stopped. Start one with %distnb start --workers 2 --ps 1, or "
                "distnb.start(workers=2, ps=1), and make strategy and coordinator anew."
            )
        if self._lost_servers:
            raise ServerLost(self._server_text(next(iter(self._lost_servers))))

    def _server_text(self, server: int) -> str:
        how = self._lost_servers[server]
        if server in self._empty_servers:
            return (
                f"Parameter server {server} {how}. Another one is in its place, and holds nothing yet. Restore the "
                "variables from a checkpoint: coordinator.recover(checkpoint_manager)."
            )
        return (
            f"Parameter server {server} {how}, and the variables that it held are gone. Start another one in its place "
            "with %distnb restart --missing, and restore the variables from a checkpoint: "
            "coordinator.recover(checkpoint_manager)."
        )

    # -- the link's thread -----------------------------------------------------------------------------------------

    def _next_deadline(self) -> float | None:
        with _lock:
            return self._queue.next_deadline()

    def _handle(self, event: Event | None) -> None:
        """Handle one event; None: time has passed."""
        now = time.monotonic()
        with _lock:
            if event is not None and _logger.isEnabledFor(logging.DEBUG):
                _logger.debug("received %s", type(event).__name__)
            self._carry_out(self._after(event, now))
            self._wake()

    def _after(self, event: Event | None, now: float) -> list[Order]:
        queue = self._queue
        match event:
            case ClosureEnded():
                return self._ended(event, now)
            case ClosureGivenBack(program=program):
                number, worker = self._programs.pop(program, (None, 0))
                return [] if number is None else queue.given_back(worker, number, now)
            case ClosureGivenUp(program=program, reply=reply):
                number, worker = self._programs.get(program, (None, 0))  # its reply may come yet
                if number is None:
                    return []
                orders: list[Order] = []
                if reply is not None and number in self._closures:
                    self._errors.append(self._error_of(reply, worker, self._closures[number].value.name))
                    orders = queue.cancel(now)
                return orders + queue.given_up(worker, number, now)
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
        if closure is None or closure.program != reply.program:  # it was given up on
            return self._queue.ended(worker, number, "cancelled", now)
        name = closure.value.name
        if reply.status == "ok":
            self._forget(number)
            try:
                for each in (reply, *others):
                    if each.value.contributions is not None:
                        self._packer.merge(each.value.contributions)
            except Exception as refusal:  # noqa: BLE001 - a metric's own code
                refusal.add_note(f"What {name} had counted on worker {worker} could not be added to the metric.")
                if not self._queue.ending:
                    self._why = f"what {name} had counted could not be added to a metric"
                return self._failed(closure, worker, number, refusal, now)
            self._staleness.extend(reply.value.staleness)
            self._steps += len(reply.value.staleness)
            closure.value.resolve(reply.value.value, open_value)
            return self._queue.ended(worker, number, "done", now)
        if reply.status == "aborted" and self._queue.is_asked_back(worker, number):
            return self._queue.given_back(worker, number, now)  # its reply came before the news of that
        if reply.status != "error" or reply.error is None:
            if not self._queue.ending:
                self._why = "its worker was told to end it"
            return self._queue.ended(worker, number, "cancelled", now)
        error = self._error_of(reply, worker, name)
        self._forget(number)
        return self._failed(closure, worker, number, error, now)

    def _failed(self, closure: _Closure, worker: int, number: int, error: BaseException, now: float) -> list[Order]:
        closure.value.spoil(error, "failed")
        self._errors.append(error)
        return self._queue.ended(worker, number, "failed", now)

    def _error_of(self, reply: Reply, worker: int, name: str) -> BaseException:
        """Return the exception that a closure raised. The others are cancelled for that."""
        report = reply.error
        assert report is not None
        if not self._queue.ending:
            self._why = f"{name} failed on worker {worker} ({report.type_name}: {_line(report.text)})"
        return self._link.error(report, worker, name)

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
            waiter.look()

    # -- carrying out ----------------------------------------------------------------------------------------------

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, Send):
                self._send(order)
            elif isinstance(order, Cancel):
                value = self._forget(order.closure).value
                text = f"{value.name} was cancelled before it had a result: {self._why}"
                value.spoil(ClosureCancelled(text if text.endswith(".") else f"{text}."), "cancelled")
            elif isinstance(order, Interrupt):
                self._link.interrupt(self._closures[order.closure].program)
            elif isinstance(order, Reclaim):
                self._link.take_back(order.worker, self._closures[order.closure].program)
            elif isinstance(order, ReportNoWorker):
                print(f"distnb: {self._nobody()}", file=sys.stderr)

    def _send(self, order: Send) -> None:
        closure = self._closures[order.closure]
        seed = functools.partial(self._seed_of, order.worker)
        closure.program = program = self._link.number()
        message = self._sent[order.worker].message(
            program, order.closure, _fence(), closure.packed, self._packer, self._link, seed
        )
        closure.value.state = "running"
        self._programs[program] = (order.closure, order.worker)
        self._link.send(order.worker, message)

    def _seed_of(self, worker: int) -> int:
        """Return the seed of a worker's random numbers: each has its own, derived from the seed that is set here."""
        if self._seed is None:
            import torch

            self._seed = int(torch.randint(1 << 62, ()))
        return random.Random(f"{self._seed} {worker}").getrandbits(63)

    def _nobody(self) -> str:
        stuck = [str(worker) for worker, state in self._queue.workers.items() if state.stuck]
        if stuck:
            return (
                f"closures wait: worker {', '.join(stuck)} is busy with one that was ended, and no other worker is "
                "there. %distnb restart starts it anew."
            )
        return (
            "closures wait, and no worker is there to run them. They go on when one comes: %distnb restart --missing "
            "starts those that are missing, and so does distnb.Cluster.restart(missing=True)."
        )


def _fence() -> Fence:
    """Return the closures that have ended, whoever scheduled them.

    Every request to a server carries it. So whoever has seen a value after a closure was cancelled, the coordinator or
    a later closure, has also ordered the server that held it to refuse that closure's changes.
    """
    with _lock:
        queues = [each._queue for each in _coordinators.values()]
        running = [queue.oldest for queue in queues if not queue.idle]
        oldest = min(running) if running else max(queue.oldest for queue in queues)
        astray = {closure for queue in queues for closure in queue.astray(oldest)}
    return Fence(oldest, tuple(sorted(astray)))


def running_coordinators() -> list[ClusterCoordinator]:
    """Return the coordinators whose clusters have not been stopped."""
    return [each for each in tuple(_coordinators.values()) if not each._link.closed]


def stories() -> list[list[Transition]]:
    """Return the latest transitions of each coordinator's queue, the oldest first."""
    with _lock:
        return [each._queue.story for each in _coordinators.values()]


def _fetched(value: Any) -> Any:
    if isinstance(value, PerWorkerValues):
        raise OptionError(
            f"fetch got {value!r}, which each worker has its own of. Fetch what a closure returns: "
            "coordinator.fetch(coordinator.schedule(lambda value: value, args=(per_worker,)))."
        )
    return value.fetch() if isinstance(value, RemoteValue) else value


def _line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__

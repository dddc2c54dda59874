"""Coordinator, workers and parameter servers in one process, where one thing happens at a time, in a drawn order.

Workers are threads, of which one runs until it sends a request to a server. Messages wait in queues until the world
delivers them. So late ones reach a server after their worker was killed or its closure was cancelled. Each seed gives
one story.
"""

from __future__ import annotations

import pickle
import random
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from distnb.coordinator import ClusterCoordinator
from distnb.errors import ServerLost
from distnb.servers.closure_messages import NO_FENCE, Fence, RunClosure
from distnb.servers.coordinator import references
from distnb.servers.coordinator.link import (
    ClosureAbandoned,
    ClosureEnded,
    ClosureReclaimed,
    ServerGone,
    ServerUp,
    WorkerLost,
    WorkerUp,
)
from distnb.servers.engine.closure_runner import Runner
from distnb.servers.server_messages import ServerReply, ServerRequest
from distnb.servers.variables import roles
from distnb.servers.variables.access import ServerAccess
from distnb.servers.variables.here import servers_here
from distnb.servers.variables.storage.store import ShardStore
from distnb.wire.messages import ErrorReport, Reply

__all__ = ["SimulatedCluster", "SimulatedWaiter"]

_ASTRAY = 3
_STUCK = 20_000  # steps of the world after which any wait should be over


class _Killed(BaseException):
    """An exception that ends a worker's thread."""


class _Aborted(BaseException):
    """An exception that ends a closure, as the engine's control thread does."""


class Connections:
    """The connections of one client to the servers, with the interface of `Servers`."""

    def __init__(self, world: SimulatedCluster, client: Any) -> None:
        self.count = len(world.stores)
        self._world = world
        self._client = client
        self._numbers = iter(range(1, 1 << 60))

    def exchange(self, requests: Mapping[int, Sequence[Any]], fence: Fence = NO_FENCE) -> dict[int, tuple[Any, ...]]:
        waiting = {}
        presses = self._world.presses() if self._client is None else 0
        if presses == 1:
            raise KeyboardInterrupt
        for server, operations in requests.items():
            if server in self._world.gone:
                raise ServerLost(f"Parameter server {server} is lost.")
            waiting[server] = number = next(self._numbers)
            request = pickle.dumps(ServerRequest(number, fence, tuple(operations)))
            self._world.to_servers.setdefault((self._client, server), deque()).append(request)
        if presses == 2:
            raise KeyboardInterrupt
        answers = self._world.answers(self._client, waiting)
        if presses == 3:
            raise KeyboardInterrupt
        for server in requests:
            if answers[server].error is not None:
                raise answers[server].error  # type: ignore[misc]
        return {server: answers[server].results for server in requests}

    def generation(self, server: int) -> int:
        return self._world.generations[server]


class SimulatedWorker:
    """The process of a worker: a thread that runs while the world lets it."""

    def __init__(self, world: SimulatedCluster, index: int, process: int) -> None:
        self.world, self.index, self.process = world, index, process
        self.inbox: deque[bytes] = deque()
        self.to_end: set[int] = set()  # the programs to end
        self.abandoned: set[int] = set()
        self.withdrawn: set[int] = set()
        self.program: int | None = None
        self.stopped = self.killed = False
        self.waiting: dict[int, int] = {}  # by server, the request whose answer is awaited
        self.answers: dict[int, ServerReply] = {}
        self.error: str | None = None
        self._access = ServerAccess(Connections(world, (index, process)), is_worker=True)  # type: ignore[arg-type]
        self._access.optimizers.next_is_here = lambda: bool(self.inbox)
        self._runner = Runner(self._access, index)
        self._runtimes: dict[Any, Any] = {}
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """True if it has something to do."""
        if self.stopped or not self._thread.is_alive():
            return False
        if self.program is None:
            return bool(self.inbox)
        return self.waiting.keys() <= self.answers.keys() or self.program in self.to_end

    def resume(self) -> None:
        """Let it run until it waits."""
        before = servers_here.access, roles._runtimes
        servers_here.access, roles._runtimes = self._access, self._runtimes
        references.open_by(self._runner)
        self._go.release()
        self._paused.acquire()
        servers_here.access, roles._runtimes = before
        assert self.error is None, self.error

    def end(self) -> None:
        """Kill it."""
        self.killed = True
        self.stopped = False
        if self._thread.is_alive():
            self.resume()
        self._thread.join(10)

    def pause(self) -> None:
        """Let the others continue. Called on its own thread."""
        self._paused.release()
        self._go.acquire()
        if self.killed:
            raise _Killed
        if self.program in self.to_end and self.world.rng.random() < 0.7:
            self.to_end.discard(self.program)  # an order is carried out only once
            raise _Aborted

    def _live(self) -> None:
        self._go.acquire()
        try:
            while not self.killed:
                if self.inbox:
                    self._run(pickle.loads(self.inbox.popleft()))
                else:
                    self._paused.release()
                    self._go.acquire()
        except _Killed:
            pass
        except BaseException:  # an error in the test
            self.error = traceback.format_exc()
        finally:
            self._paused.release()

    def _run(self, message: RunClosure) -> None:
        self.program = message.program
        self._runner.receive(message)
        fresh = self._access.optimizers.pop_fresh()
        try:
            if message.program in self.to_end | self.withdrawn:
                raise _Aborted
            result = self._runner.run(message, fresh)
            reply = Reply(program=message.program, status="ok", value=pickle.loads(pickle.dumps(result)))
        except _Aborted:
            reply = Reply(program=message.program, status="aborted")
        except Exception as error:  # an error of the closure
            text = "".join(traceback.format_exception(error))
            report = ErrorReport(
                pickled=pickle.dumps(error), type_name=type(error).__name__, text=text, traceback=(), rendered=()
            )
            reply = Reply(program=message.program, status="error", error=report)
        self.program, self.waiting = None, {}
        self.to_end.discard(message.program)
        self.world.news.append((self, ClosureEnded(self.index, reply)))


class SimulatedCluster:
    """A cluster, with the messages and closures under way in it.

    Args:
        seed: The seed of the order of events.
        workers, servers: The numbers of workers and servers.

    Attributes:
        rng: The generator that draws the order.
        link: The coordinator's `ClusterLink`.
    """

    def __init__(self, seed: int, workers: int, servers: int) -> None:
        self.rng = random.Random(seed)
        self.generations = [0] * servers
        self.stores = [ShardStore(first_version=1) for _ in range(servers)]
        self.gone: set[int] = set()
        self.to_servers: dict[tuple[Any, int], deque[bytes]] = {}
        self.news: deque[tuple[SimulatedWorker, Any]] = deque()
        self.workers: dict[int, SimulatedWorker] = {}
        self.astray: list[
            SimulatedWorker
        ] = []  # given up on and replaced, or lost to the coordinator, and still running
        self._processes = 0
        self._of_servers = ThreadPoolExecutor(1)  # in which no scope is open
        self._press_in: int | None = None
        self._waiting: dict[int, int] = {}
        self._answers: dict[int, ServerReply] = {}
        self._by_program: dict[int, SimulatedWorker] = {}
        self.link = _Link(self, workers)
        for index in range(workers):
            self._start(index)

    def close(self) -> None:
        """End all threads."""
        self.link.closed = True
        for worker in [*self.workers.values(), *self.astray]:
            worker.end()
        self._of_servers.shutdown()

    # Events ---------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Let one thing happen. Return whether there was any."""
        happenings: list[Callable[[], None]] = []
        for (client, server), queue in self.to_servers.items():
            if queue and server not in self.gone:
                happenings.append(lambda client=client, server=server: self._deliver(client, server))  # type: ignore[misc]
        for worker in [*self.workers.values(), *self.astray]:
            if worker.ready:
                happenings += [worker.resume] * 2
        if self.news:
            happenings += [self._deliver_news] * 2
        if not happenings:
            return False
        self.rng.choice(happenings)()
        return True

    def until(self, ready: Callable[[], bool]) -> None:
        """Let things happen until a condition holds."""
        for _ in range(_STUCK):
            if ready():
                return
            if not self.step():
                self._tick()
        raise AssertionError("Whoever waits here waits for ever.")

    def _tick(self) -> None:
        """Let time pass."""
        stopped = [each for each in self.workers.values() if each.stopped]
        if stopped:
            self.give_up()
            self.rng.choice(stopped).stopped = False
        self.link.deliver(None)

    def _deliver(self, client: Any, server: int) -> None:
        request = pickle.loads(self.to_servers[client, server].popleft())
        found = self._of_servers.submit(self.stores[server].handle, request).result()
        answer = pickle.loads(pickle.dumps(found))
        if client is None:
            waiting, answers = self._waiting, self._answers
        else:
            found = [each for each in [*self.workers.values(), *self.astray] if (each.index, each.process) == client]
            if not found:
                return
            waiting, answers = found[0].waiting, found[0].answers
        if waiting.get(server) == answer.number:
            answers[server] = answer

    def _deliver_news(self) -> None:
        worker, event = self.news.popleft()
        if self.workers.get(worker.index) is worker:
            program = event.reply.program if isinstance(event, ClosureEnded) else event.program
            if self._by_program.pop(program, None) is not None:  # of two reports of its end, the first counts
                self.link.deliver(event)

    def answers(self, client: Any, waiting: dict[int, int]) -> dict[int, ServerReply]:
        """Wait for answers, by server. Called on the client's thread."""
        if client is None:
            self._waiting, self._answers = waiting, {}
            self.until(lambda: waiting.keys() <= self._answers.keys() or bool(self.gone & waiting.keys()))
            self._refuse_gone(waiting, self._answers)
            return self._answers
        worker = next(each for each in [*self.workers.values(), *self.astray] if (each.index, each.process) == client)
        worker.waiting, worker.answers = waiting, {}
        while True:
            worker.pause()
            self._refuse_gone(waiting, worker.answers)
            if waiting.keys() <= worker.answers.keys():
                worker.waiting = {}
                return worker.answers

    def _refuse_gone(self, waiting: Mapping[int, int], answers: Mapping[int, ServerReply]) -> None:
        for server in waiting:
            if server in self.gone and server not in answers:
                raise ServerLost(f"Parameter server {server} has ended.")

    def presses(self) -> int:
        """Return when the user presses Ctrl-C in this exchange: never (0), before, after the requests, at the end."""
        if self._press_in is None:
            return 0
        self._press_in -= 1
        if self._press_in:
            return 0
        self._press_in = None
        return self.rng.randint(1, 3)

    # Interventions --------------------------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        self._processes += 1
        self.workers[index] = SimulatedWorker(self, index, self._processes)

    def advance(self, draws: random.Random) -> None:
        """Let some things happen."""
        for _ in range(draws.randint(1, 40)):
            self.step()

    def kill(self, draws: random.Random) -> None:
        """Kill a worker, whose latest messages may still arrive. Another one replaces it."""
        index = draws.choice(list(self.workers))
        worker = self.workers[index]
        worker.end()
        for owner, event in [each for each in self.news if each[0] is worker]:
            self.link.deliver(event)
            self.news.remove((owner, event))
        self._processes += 1
        if self.rng.random() < 0.5:
            self._drop(worker)
        self.workers.pop(index)
        self.link.deliver(WorkerLost(index, "was killed"))
        self._start(index)
        self.link.deliver(WorkerUp(index))

    def lose(self, draws: random.Random) -> None:
        """Lose the connection with a worker, which continues to run. Another one replaces it."""
        if len(self.astray) >= _ASTRAY:
            return
        index = draws.choice(list(self.workers))
        worker = self.workers.pop(index)
        self.astray.append(worker)
        self.link.deliver(WorkerLost(index, "cannot be reached"))
        self._start(index)
        self.link.deliver(WorkerUp(index))

    def stop(self, draws: random.Random) -> None:
        """Stop a worker."""
        draws.choice(list(self.workers.values())).stopped = True

    def go_on(self) -> None:
        """Continue all stopped workers."""
        for worker in [*self.workers.values(), *self.astray]:
            worker.stopped = False

    def press(self, draws: random.Random, work: Callable[[], None]) -> None:
        """Press Ctrl-C during an action on the coordinator, at one of its next messages to servers."""
        self._press_in = draws.randint(1, 4)
        try:
            work()
        finally:
            self._press_in = None

    def give_up(self) -> None:
        """Stop waiting for workers to follow the order to end their closures."""
        for worker in list(self.workers.values()):
            for program in sorted(worker.to_end - worker.abandoned):
                worker.abandoned.add(program)
                self.link.deliver(ClosureAbandoned(worker.index, program))

    def drain(self) -> None:
        """Let everything happen that is under way."""
        self.until(lambda: not self.step())

    def kill_a_server(self, draws: random.Random) -> int:
        """Kill a server."""
        server = draws.randrange(len(self.stores))
        self.gone.add(server)
        for (_, other), queue in self.to_servers.items():
            if other == server:
                queue.clear()
        self.link.deliver(ServerGone(server, "was killed"))
        return server

    def replace_server(self, server: int) -> None:
        """Replace a lost server by another one, which holds nothing."""
        self.gone.discard(server)
        self.generations[server] += 1
        self.stores[server] = ShardStore(first_version=self.generations[server] << 32)
        self.link.deliver(ServerUp(server))

    def _drop(self, worker: SimulatedWorker) -> None:
        for (client, _), queue in self.to_servers.items():
            if client == (worker.index, worker.process):
                queue.clear()


class _Link(SimpleNamespace):
    """The `ClusterLink` of the coordinator in this world."""

    def __init__(self, world: SimulatedCluster, workers: int) -> None:
        super().__init__(
            servers=Connections(world, None),
            replicas_per_worker=1,
            workers=tuple(range(workers)),
            closed=False,
        )
        self._world = world
        self._programs = 0
        self._listeners: list[Callable[[Any], None]] = []

    def deliver(self, event: Any) -> None:
        for listener in self._listeners:
            listener(event)

    def subscribe(self, listener: Callable[[Any], None], deadline: Any) -> None:
        self._listeners.append(listener)
        for index in self.workers:
            listener(WorkerUp(index))

    def number(self) -> int:
        self._programs += 1
        return self._programs

    def send(self, worker: int, message: RunClosure) -> None:
        found = self._world._by_program[message.program] = self._world.workers[worker]
        found.inbox.append(pickle.dumps(message))

    def reclaim(self, worker: int, program: int) -> None:
        found = self._world.workers[worker]
        if any(pickle.loads(data).program == program for data in found.inbox):
            found.withdrawn.add(program)
            self._world.news.append((found, ClosureReclaimed(worker, program)))

    def interrupt(self, program: int) -> None:
        found = self._world._by_program.get(program)
        if found is not None:
            found.to_end.add(program)

    def watch(self, coordinator: ClusterCoordinator) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def error(self, report: ErrorReport, worker: int, name: str) -> BaseException:
        found: BaseException = pickle.loads(report.pickled)
        found.add_note(report.text)
        return found


class SimulatedWaiter:
    """The `Waiter` of this world."""

    world: SimulatedCluster

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    def check(self) -> None:
        """Do nothing: waiting itself makes things happen."""

    def wait(self, interrupts_fd: int | None) -> bool:
        self.world.until(self._ready)
        return True

    def wait_for(self, seconds: float) -> None:
        self.world.until(self._ready)

    def close(self) -> None:
        """Hold nothing."""

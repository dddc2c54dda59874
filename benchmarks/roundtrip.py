"""Compare `strategy.run` from the notebook to 2 replicas and back with ipyparallel, Ray and bare ZMQ, in one run.

    python -m benchmarks.roundtrip [--rounds 7] [--calls 50]

The function returns None, so the benchmark measures the way there and back. Blocking: each call waits for the one
before. Pipelined: `--calls` calls are sent, and then their results are awaited (`RunOptions(wait=False)`); the time is
per call. Ray takes part if it is installed. A call of the coordinator is one closure for each of two workers; it has
no server to write to.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import ipyparallel
import zmq

from benchmarks.guard import TARGETS
from benchmarks.harness import Comparison, Measure, compare, options, report, timed
from benchmarks.ranks import Ranks, serve

CLOSURES = "distnb closures"
DISTNB, IPYPARALLEL, RAY, ZMQ = "distnb strategy.run", "ipyparallel apply_sync", "Ray actors", "bare ZMQ"


def nothing() -> None:
    """Do nothing: the benchmark measures the way there and back."""


def _serve(url: str) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(url)
    socket.send(b"hello")
    while request := socket.recv():
        function, args = pickle.loads(request)
        socket.send(pickle.dumps(function(*args)))


class BareZmq:
    """The least that a round trip can cost here: workers behind ROUTER and DEALER on loopback, pickle, nothing else.

    Args:
        n: The number of workers.
    """

    def __init__(self, n: int = 2) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        spawn = multiprocessing.get_context("spawn")
        self._processes = [spawn.Process(target=_serve, args=(f"tcp://127.0.0.1:{port}",)) for _ in range(n)]
        for process in self._processes:
            process.start()
        self._peers: list[bytes] = [self._socket.recv_multipart()[0] for _ in range(n)]

    def __enter__(self) -> BareZmq:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self._peers:
            self._socket.send_multipart([peer, b""])
        for process in self._processes:
            process.join(10)
        self._socket.close(0)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on each worker and wait for all answers."""
        self.send(function, *args)
        return self.collect(1)

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on each worker without waiting."""
        request = pickle.dumps((function, args))
        for peer in self._peers:
            self._socket.send_multipart([peer, request])

    def collect(self, calls: int) -> list[Any]:
        """Return the answers to a number of calls."""
        return [pickle.loads(self._socket.recv_multipart()[1]) for _ in range(calls * len(self._peers))]


@contextlib.contextmanager
def distnb_measures(calls: int) -> Iterator[tuple[Measure, Measure]]:
    """Measure distnb, blocking and pipelined."""
    import distnb

    distnb.start(n=2)
    try:
        strategy = distnb.MirroredStrategy()
        no_wait = distnb.RunOptions(wait=False)
        # Functions of a notebook are defined there; this one must not be importable on the engines.
        function = eval("lambda: None")

        def pipelined() -> None:
            for _ in range(calls):
                strategy.run(function, options=no_wait)
            strategy.run(function)

        pipeline = timed(pipelined)
        yield timed(lambda: strategy.run(function), calls), lambda: pipeline() / (calls + 1)
    finally:
        distnb.stop()


@contextlib.contextmanager
def closures_measures(calls: int) -> Iterator[tuple[Measure, Measure]]:
    """Measure closures of distnb's coordinator, in a process of its own: a process has one cluster."""
    coordinator = Ranks("benchmarks.roundtrip", CLOSURES, 1)
    try:
        yield lambda: coordinator.step("blocking", calls), lambda: coordinator.step("pipelined", calls)
    finally:
        coordinator.close()


def act_as_coordinator() -> int:
    """Answer requests with the seconds of one call."""
    import distnb

    with contextlib.redirect_stdout(sys.stderr):  # stdout itself is for answers
        distnb.start(workers=2, ps=1)
    coordinator = distnb.coordinator.ClusterCoordinator(distnb.ParameterServerStrategy())
    function = eval("lambda: None")

    def blocking() -> None:
        coordinator.fetch([coordinator.schedule(function) for _ in range(2)])

    def measure(what: str, calls: int) -> float:
        if what == "blocking":
            return timed(blocking, calls)()

        def pipelined() -> None:
            for _ in range(2 * calls):
                coordinator.schedule(function)
            coordinator.join()

        return timed(pipelined)() / calls

    try:
        return serve(measure)
    finally:
        distnb.stop()


@contextlib.contextmanager
def ipyparallel_measures(calls: int) -> Iterator[tuple[Measure, Measure]]:
    """Measure ipyparallel's DirectView: `apply_sync`, and `apply_async` with all results awaited at the end."""
    cluster = ipyparallel.Cluster(n=2, log_level=logging.ERROR)
    client = cluster.start_and_connect_sync(activate=False)
    try:
        view: Any = client[:]

        def pipelined() -> None:
            for result in [view.apply_async(nothing) for _ in range(calls)]:
                result.get()

        pipeline = timed(pipelined)
        yield timed(lambda: view.apply_sync(nothing), max(1, calls // 5)), lambda: pipeline() / calls
    finally:
        client.close()
        cluster.stop_cluster_sync()


@contextlib.contextmanager
def ray_measures(calls: int) -> Iterator[tuple[Measure, Measure]]:
    """Measure two Ray actors: `ray.get` of both, or of all tasks at the end."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)

    class Actor:
        def call(self) -> None:
            pass

    try:
        actors: list[Any] = [ray.remote(num_cpus=0)(Actor).remote() for _ in range(2)]

        def pipelined() -> None:
            ray.get([actor.call.remote() for _ in range(calls) for actor in actors])

        pipeline = timed(pipelined)
        yield timed(lambda: ray.get([a.call.remote() for a in actors]), calls), lambda: pipeline() / calls
    finally:
        ray.shutdown()


@contextlib.contextmanager
def zmq_measures(calls: int) -> Iterator[tuple[Measure, Measure]]:
    """Measure bare ZMQ."""
    with BareZmq(2) as workers:

        def pipelined() -> None:
            for _ in range(calls):
                workers.send(nothing)
            workers.collect(calls)

        pipeline = timed(pipelined)
        yield timed(lambda: workers.call(nothing), calls), lambda: pipeline() / calls


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(__doc__, rounds=7, calls=50, rank="")
    if given.rank:
        return act_as_coordinator()

    makers = {
        DISTNB: distnb_measures,
        CLOSURES: closures_measures,
        IPYPARALLEL: ipyparallel_measures,
        RAY: ray_measures,
        ZMQ: zmq_measures,
    }
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed: no comparison with it (pip install ray).")
        del makers[RAY]
    with contextlib.ExitStack() as stack:
        pairs = {name: stack.enter_context(make(given.calls)) for name, make in makers.items()}
        blocking = compare({name: pair[0] for name, pair in pairs.items()}, rounds=given.rounds)
        pipelined = compare({name: pair[1] for name, pair in pairs.items()}, rounds=given.rounds)
    return 0 if show(blocking, pipelined) else 1


def show(blocking: Comparison, pipelined: Comparison) -> bool:
    """Print both tables. Return whether all targets are met."""
    targets = TARGETS["roundtrip"]
    met = report("one call to 2 replicas and back", blocking, baseline=DISTNB, targets=targets["blocking"])
    return report("calls, pipelined, each", pipelined, baseline=DISTNB, targets=targets["pipelined"]) and met


if __name__ == "__main__":
    raise SystemExit(main())

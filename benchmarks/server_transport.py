"""Compare pulls from and pushes to a parameter server in another process with bare ZeroMQ, in one run.

    python -m benchmarks.server_transport [--rounds 9] [--calls 200] [--megabytes 64] [--tensors 16]

A pull fetches all tensors and copies them into the client's own, as a worker does. A push sends a gradient for each
tensor, and the server makes a step of SGD. Bare ZeroMQ copies and sends the same bytes, because their owner changes
them, and its server makes the same step by hand, without names, versions or keys. memcpy copies as many bytes within a
process. The small message pulls one number; of bare ZeroMQ it is one byte, which the server sends back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch
import zmq

from benchmarks.guard import TARGETS
from benchmarks.harness import compare, report, timed
from distnb.cluster.connection import Keys, make_keys
from distnb.objects.memory.blocks import bytes_of
from distnb.servers.client import ServerConnections
from distnb.servers.server_messages import Address, Create, MakeOptimizer, Pull, Shard, StepOptimizer
from distnb.servers.variables.storage.service import Service

OURS, CURVE, IPC, TCP, MEMCPY = "distnb", "distnb, TCP with CURVE", "ZMQ ipc", "ZMQ tcp", "memcpy"
SMALL: Shard = (0, 0)
RATE = 1e-6


# -- servers -----------------------------------------------------------------------------------------------------------


def act_as_server() -> None:
    """Serve, in a server's process, as the line on standard input says, until the next line."""
    torch.set_num_threads(1)
    settings = json.loads(sys.stdin.readline())
    if "public" in settings:
        service = Service(settings["directory"], client_public=settings["public"], host="127.0.0.1")
        service.start()
        print(json.dumps(service.address), flush=True)
        sys.stdin.readline()
        service.close()
    else:
        act_as_bare_server(settings)


def act_as_bare_server(settings: dict[str, Any]) -> None:
    """Answer one client on a ZeroMQ socket."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.bind(settings["url"])
    print(json.dumps(socket.getsockopt_string(zmq.LAST_ENDPOINT)), flush=True)
    tensors = [torch.ones(size) for size in settings["sizes"]]
    while (kind := socket.recv()) != b"end":
        if kind == b"pull":
            socket.send_multipart([bytes_of(tensor) for tensor in tensors])
        elif kind == b"push":
            for tensor in tensors:
                frame = socket.recv(copy=False).buffer
                tensor.add_(torch.frombuffer(frame, dtype=torch.float32), alpha=-RATE)
            socket.send(b"done")
        else:
            socket.send(kind)
    context.destroy(linger=0)


@contextlib.contextmanager
def server(**settings: Any) -> Iterator[Any]:
    """Run a server's process, and give its address."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.server_transport", "--server"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(settings), file=process.stdin, flush=True)
    yield json.loads(process.stdout.readline())
    process.communicate("\n", timeout=20)


# -- clients -----------------------------------------------------------------------------------------------------------


class Client:
    """A contender of the comparison. Each of `pull`, `push` and `ping` waits for the answer."""

    pull: Callable[[], object]
    push: Callable[[], object]
    ping: Callable[[], object]


def sgd(groups: list[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Create the server's optimizer."""
    return torch.optim.SGD([{"params": group} for group in groups], lr=RATE)


class Ours(Client):
    """distnb's client."""

    def __init__(self, address: Address, keys: Keys, own: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        self._servers = ServerConnections({0: address}, 1, keys)
        self._own: dict[Shard, torch.Tensor] = {(number, 1): each for number, each in enumerate(own)}
        self._gradients = dict(zip(self._own, gradients, strict=True))
        module, sgd.__module__ = sgd.__module__, "__main__"  # sent by value
        factory = cloudpickle.dumps(sgd)
        sgd.__module__ = module
        creates = [Create(shard=shard, name="w", value=tensor) for shard, tensor in self._own.items()]
        self.ask(
            Create(shard=SMALL, name="small", value=torch.ones(1)),
            *creates,
            MakeOptimizer(optimizer=0, factory=factory, groups=(tuple(self._own),)),
        )
        self._changes = 0

    def ask(self, *operations: Any) -> Any:
        """Send operations in one request, and return the result of the last."""
        return self._servers.exchange({0: operations})[0][-1]

    def pull(self) -> None:
        for shard, (_, tensor) in self.ask(Pull(dict.fromkeys(self._own, -1))).items():
            self._own[shard].copy_(tensor)

    def push(self) -> None:
        self._changes += 1
        self.ask(
            StepOptimizer(
                optimizer=0, gradients=self._gradients, options=({"lr": RATE},), seen={}, token=(0, 0, self._changes)
            )
        )

    def ping(self) -> None:
        self.ask(Pull({SMALL: -1}))


class Bare(Client):
    """A client that sends the same bytes over ZeroMQ."""

    def __init__(self, url: str, own: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.connect(url)
        self._own, self._gradients = own, [bytes_of(each) for each in gradients]

    def pull(self) -> None:
        self.socket.send(b"pull")
        for own in self._own:
            frame = self.socket.recv(copy=False).buffer
            own.copy_(torch.frombuffer(frame, dtype=torch.float32))

    def push(self) -> None:
        self.socket.send_multipart([b"push", *self._gradients])
        self.socket.recv()

    def ping(self) -> None:
        self.socket.send(b"x")
        self.socket.recv()


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.server:
        act_as_server()
        return 0
    torch.set_num_threads(1)
    nbytes = options.megabytes << 20
    sizes = [nbytes // options.tensors // 4] * options.tensors
    gradients, own = [torch.ones(size) for size in sizes], [torch.zeros(size) for size in sizes]
    keys = make_keys()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        clients: dict[str, Client] = {}
        for name in (OURS, CURVE):
            address = Address(*stack.enter_context(server(public=keys.client_public, directory=directory)))
            clients[name] = Ours(address if name == OURS else address._replace(path=""), keys, own, gradients)
        for name, url in ((IPC, f"ipc://{directory}/bare"), (TCP, "tcp://127.0.0.1:*")):
            bare = Bare(stack.enter_context(server(url=url, sizes=sizes)), own, gradients)
            stack.callback(bare.socket.send, b"end")
            clients[name] = bare

        def copy() -> None:
            for one, other in zip(own, gradients, strict=True):
                one.copy_(other)

        pulls = {name: timed(each.pull) for name, each in clients.items()} | {MEMCPY: timed(copy)}
        pushes = {name: timed(each.push) for name, each in clients.items()} | {MEMCPY: timed(copy)}
        pings = {name: timed(each.ping, options.calls) for name, each in clients.items()}
        measured = [compare(each, rounds=options.rounds) for each in (pulls, pushes, pings)]
    titles = [f"{options.megabytes} MB in {options.tensors} tensors, {what}" for what in ("pulled", "pushed")]
    kept = []
    for title, comparison in zip([*titles, "A small message and its answer"], measured, strict=True):
        targets = TARGETS["server_transport"]["large" if title in titles else "small"]
        kept.append(report(title, comparison, baseline=IPC, targets=targets))
        if title in titles:
            rates = (f"{name} {nbytes / comparison.median(name) / 1e9:.2f}" for name in comparison.values)
            print(f"  GB/s: {', '.join(rates)}")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""A training step across two machines: distnb against DistributedDataParallel, over Gloo, 1 replica on each.

    sudo python -m benchmarks.across_hosts [--rounds 5] [--steps 40] [--models mlp,convnet] [--delay-ms 10]

The machines are two network namespaces with a cable between them, and host names of their own, so that nothing is
shared but the network. The cable is a veth pair; with a delay two TUN devices, whose packets a process here keeps for
that long. Each contender has a process on either machine. Beside training steps an all_reduce of 273 KB is measured,
called through `torch.distributed`: it costs what torch's own does if nothing of ours adds a round trip. Targets: at
most 1.1× DistributedDataParallel's time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import heapq
import itertools
import multiprocessing
import os
import select
import shlex
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.harness import Target, compare, report

_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_CABLE = "cable"
_PORTS = {"DDP": 29611, "distnb script": 29612}
_ALL_REDUCE = "all_reduce"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET_NBYTES = 65535


def _do(*words: str) -> None:
    subprocess.run(words, check=True, timeout=30)


@contextlib.contextmanager
def _slow_cable(names: tuple[str, str], delay_ms: float) -> Iterator[None]:
    """A cable on which each packet takes that long. (Not every kernel has tc's netem.)"""
    ends = []
    for name in names:
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        made = f"{name}c"[:15]
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", made.encode(), _IFF_TUN | _IFF_NO_PI))
        _do("ip", "link", "set", made, "netns", name)
        _do("ip", "-n", name, "link", "set", made, "name", _CABLE, "mtu", str(_PACKET_NBYTES - 535))
        ends.append(end)
    carrier = multiprocessing.get_context("fork").Process(target=_carry, args=(*ends, delay_ms / 1000), daemon=True)
    carrier.start()
    try:
        yield
    finally:
        carrier.kill()
        carrier.join()
        for end in ends:
            os.close(end)


def _carry(first: int, second: int, delay_s: float) -> None:
    """Pass packets on, each way, when their time has come."""
    under_way: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for source in select.select([first, second], [], [], wait_s)[0]:
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(source, _PACKET_NBYTES):
                    target = second if source == first else first
                    heapq.heappush(under_way, (time.monotonic() + delay_s, next(order), target, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # a full queue drops, as any network may, and so does one that is down
                os.write(target, packet)


@contextlib.contextmanager
def two_machines(delay_ms: float) -> Iterator[tuple[str, str]]:
    """The names of two connected network namespaces.

    Args:
        delay_ms: How long a packet takes from one to the other.
    """
    first, second = names = (f"bench{os.getpid()}a", f"bench{os.getpid()}b")
    with contextlib.ExitStack() as stack:
        for name in names:
            _do("ip", "netns", "add", name)
            stack.callback(_do, "ip", "netns", "del", name)
        if delay_ms:
            stack.enter_context(_slow_cable(names, delay_ms))
        else:
            _do("ip", "-n", first, "link", "add", _CABLE, "type", "veth", "peer", "name", _CABLE, "netns", second)
        for name, address in zip(names, _ADDRESSES, strict=True):
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", _CABLE)
            for link in ("lo", _CABLE):
                _do("ip", "-n", name, "link", "set", link, "up")
        yield names


class Ranks:
    """The two processes of one contender, one on each machine, with torchrun's environment.

    Args:
        machines: Their network namespaces.
        contender: "ddp" or "distnb".
        port: Where rank 0 serves the rendezvous store.
    """

    def __init__(self, machines: tuple[str, str], contender: str, port: int) -> None:
        self._processes = []
        for rank, machine in enumerate(machines):
            worker = shlex.join([sys.executable, "-m", "benchmarks.across_hosts_worker", contender])
            script = f"hostname {machine}; exec {worker}"
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": _ADDRESSES[0], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": _CABLE,
                "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            self._processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", machine, "unshare", "--uts", "sh", "-c", script],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def step(self, what: str, steps: int) -> float:
        """Seconds per step of a model, or per all_reduce, of the slower rank."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{what} {steps}\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append(float(process.stdout.readline()))
        return max(answers)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def contenders(delay_ms: float) -> Iterator[dict[str, Callable[[str, int], float]]]:
    """All contenders, running: name to a function of (model, steps) to seconds per step."""
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(two_machines(delay_ms))
        made = {}
        for (name, port), contender in zip(_PORTS.items(), ("ddp", "distnb"), strict=True):
            made[name] = Ranks(machines, contender, port)
            stack.callback(made[name].close)
        yield {name: ranks.step for name, ranks in made.items()}


def main() -> int:
    """Run it. Returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--models", default="mlp,convnet")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="how long a packet takes between the machines")
    options = parser.parse_args()

    met = True
    with contenders(options.delay_ms) as running:
        for what in [_ALL_REDUCE, *options.models.split(",")]:
            measures = {name: functools.partial(step, what, options.steps) for name, step in running.items()}
            comparison = compare(measures, rounds=options.rounds, warmup=2)
            targets = [Target(name, "DDP", at_most=1.1) for name in running if name != "DDP"]
            title = "an all_reduce of 273 KB" if what == _ALL_REDUCE else f"a training step, {what}"
            met &= report(f"{title}, across two machines", comparison, baseline="DDP", targets=targets)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())

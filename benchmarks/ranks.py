"""Contenders that are processes in torchrun's environment, and measure on request."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

from benchmarks.slow_cable import slow_cable

__all__ = ["REPLICAS", "Ranks", "serve", "two_machines"]

REPLICAS = 2
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_CABLE = "cable"
_PORT = 29611


class Ranks:
    """The processes of one contender.

    Args:
        module: The module that they run, with `--rank CONTENDER`. It calls `serve`.
        contender: The name of the contender in that module.
        replicas: The number of processes.
        machines: The network namespaces, one for each process; none for this machine.
        python: The interpreter, for packages that conflict with ours. It need not have torch.
        variables: Further environment variables.
    """

    def __init__(
        self,
        module: str,
        contender: str,
        replicas: int = REPLICAS,
        machines: tuple[str, ...] = (),
        *,
        python: str = sys.executable,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(replicas), **(variables or {})}
        if machines:
            self._store = None
            port = str(_PORT + sum(map(ord, contender)) % 100)
            environment |= {"MASTER_ADDR": _ADDRESSES[0], "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": _CABLE}
        else:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
            environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        local = 1 if machines else replicas
        self._processes = []
        for rank in range(replicas):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}
            command = [python, "-m", module, "--rank", contender]
            if machines:  # with a separate host name, so that only the network is shared
                named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', machines[rank]]
                command = ["ip", "netns", "exec", machines[rank], *named, *command]
            pipe = subprocess.PIPE
            self._processes.append(
                subprocess.Popen(command, env={**environment, **own}, stdin=pipe, stdout=pipe, text=True)
            )

    def step(self, what: str, count: int) -> float:
        """Return the seconds of one `what`, repeated `count` times, on the slowest process."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{what} {count}\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append(float(process.stdout.readline() or "nan"))
        return max(answers)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve(measure: Callable[[str, int], float]) -> int:
    """Serve as a rank: read lines `WHAT COUNT`, and answer each with the measure of one. Return 0 at the end."""
    for line in sys.stdin:
        what, _, count = line.rpartition(" ")
        print(measure(what, int(count)), flush=True)
    return 0


@contextlib.contextmanager
def two_machines(delay_ms: float = 0.0) -> Iterator[tuple[str, ...]]:
    """Provide two network namespaces with a cable between them. It needs root.

    Args:
        delay_ms: The delay of each packet.
    """
    first, second = names = (f"bench{os.getpid()}a", f"bench{os.getpid()}b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=30)

    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        if delay_ms:
            stack.enter_context(slow_cable(names, _CABLE, delay_ms))
        else:
            ip("-n", first, "link", "add", _CABLE, "type", "veth", "peer", "name", _CABLE, "netns", second)
        for name, address in zip(names, _ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", _CABLE)
            for link in ("lo", _CABLE):
                ip("-n", name, "link", "set", link, "up")
        yield names

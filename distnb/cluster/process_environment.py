"""The environment variables of a process that computes: threads, network interfaces, and who it is."""

from __future__ import annotations

import multiprocessing
import os
import re
import site
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distnb.cluster.connection import CONNECTION_VARIABLE, connection_path
from distnb.topology import Device

__all__ = [
    "AGENT_VARIABLE",
    "DEVICE_VARIABLE",
    "ENGINE_VARIABLE",
    "PYTHON_MODULE",
    "STORE_VARIABLE",
    "THREADS_VARIABLE",
    "Seat",
    "compute_environment",
    "cores",
    "engines_environment",
    "hash_seed",
    "import_environment",
    "keep_temporary_sockets_in",
    "rank_environment",
    "script_environment",
    "threads_for",
    "without_another_place",
]

ENGINE_VARIABLE = "DISTNB_ENGINE_ID"
DEVICE_VARIABLE = "DISTNB_DEVICE"
THREADS_VARIABLE = "DISTNB_THREADS"
STORE_VARIABLE = "DISTNB_STORE_FILE"
"""Where replicas of a script on this machine meet."""
AGENT_VARIABLE = "DISTNB_AGENT"
"""Module whose `install` makes an engine of the process; tests put a small one in the agent's place."""

PYTHON_MODULE = (sys.executable, "-P", "-m")
"""Runs a module. -P: a file of the user's, such as random.py beside the notebook, does not stand in for a module."""

_OF_A_TASK = re.compile(r"TF_CONFIG|(OMPI|PMIX?|PMI2|PRTE|MPI|MPIR|HYD[A-Z]*)_.*|SLURM_(?!JOB|CONF).*")


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_for(processes: int, environment: Mapping[str, str] = os.environ) -> int:
    """Threads for each of several processes that compute side by side, so that they don't fight for the cores.

    A number that the user set in OMP_NUM_THREADS is left as it is.
    """
    chosen = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(chosen) if chosen.isdigit() and int(chosen) > 0 else max(1, cores() // processes)


def compute_environment(processes: int) -> dict[str, str]:
    """For every process that computes on this machine together with others.

    All communication stays on the loopback interface: Gloo and NCCL would listen on a public one.
    """
    return {
        "OMP_NUM_THREADS": str(threads_for(processes)),
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_RAS_ENABLE": "0",  # a monitoring port of its own, which nobody here reads
        "PYTHONHASHSEED": hash_seed(),
        # Without it torch's C++ code warns, in a cell's output, that a machine's address has no name.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        **import_environment(),
    }


def hash_seed() -> str:
    """Sets of strings have the same order on all replicas: a loop over one may call collectives."""
    seed = os.environ.get("PYTHONHASHSEED", "0")
    return seed if seed.isdigit() else "0"


def import_environment() -> dict[str, str]:
    """Lets a child process import the distnb that this process uses, also when that is a checkout and not installed."""
    package = str(Path(__file__).parents[2])
    if package in (*site.getsitepackages(), site.getusersitepackages()):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}


def without_another_place(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a launcher tells its task of the place among others: an engine has one of its own.

    Libraries would take it for theirs; MPI would even wait for its launcher. What Slurm tells of the whole job stays.
    """
    return {name: value for name, value in environment.items() if not _OF_A_TASK.fullmatch(name)}


def keep_temporary_sockets_in(directory: Path) -> None:
    """Make multiprocessing of this process put its sockets there: a process that is killed cannot remove a place of
    its own, and this directory is removed by others."""
    multiprocessing.current_process()._config["tempdir"] = str(directory)  # type: ignore[attr-defined]


def engines_environment(engines: int, directory: Path, *, agent: str) -> dict[str, str]:
    """What is the same for all engines of a cluster of `engines` on this machine, with this run directory."""
    return {
        **compute_environment(engines),
        THREADS_VARIABLE: str(threads_for(engines)),
        CONNECTION_VARIABLE: str(connection_path(directory)),
        AGENT_VARIABLE: agent,
    }


@dataclass(frozen=True)
class Seat:
    """Where one worker's replicas stand among those of a cluster of machines; by default it is the only one.

    Attributes:
        store_host, store_port: Where the rendezvous store listens; with `store_file` an address that nobody listens
            on, for the script's own use.
        store_file: The file, in a private directory, that is the rendezvous store; "" where workers meet over a
            network.
        worker, workers: Which of how many workers this is; all have as many replicas.
        network: See `placement.network_environment`; empty to stay on loopback.
    """

    store_host: str
    store_port: int
    store_file: str = ""
    worker: int = 0
    workers: int = 1
    network: Mapping[str, str] = field(default_factory=dict)


def rank_environment(local_rank: int, replicas: int, seat: Seat) -> dict[str, str]:
    """torchrun's variables, which mean here what they mean there, for one of a worker's `replicas`."""
    return {
        "RANK": str(seat.worker * replicas + local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(seat.worker),
        "WORLD_SIZE": str(seat.workers * replicas),
        "LOCAL_WORLD_SIZE": str(replicas),
        "MASTER_ADDR": seat.store_host,
        "MASTER_PORT": str(seat.store_port),
        STORE_VARIABLE: seat.store_file,
        # We serve the store, on one address: torch is not to listen for it, on every interface, itself.
        "TORCHELASTIC_USE_AGENT_STORE": str(not seat.store_file),
        "TORCHELASTIC_RUN_ID": f"distnb-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def script_environment(local_rank: int, device: Device, devices: Sequence[Device], seat: Seat) -> dict[str, str]:
    """The whole environment of one replica of a script, whose worker has these devices."""
    # Code for torchrun takes `cuda:LOCAL_RANK`: the GPUs that were named are made those of these numbers.
    gpus = list(dict.fromkeys(device.index for device in devices if device.type == "cuda"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if "CUDA_VISIBLE_DEVICES" in os.environ else None
    if device.type == "cuda":
        device = Device("cuda", gpus.index(device.index))
    return {
        **os.environ,
        **compute_environment(len(devices)),
        **seat.network,
        **rank_environment(local_rank, len(devices), seat),
        "PYTHONUNBUFFERED": "1",
        THREADS_VARIABLE: str(threads_for(len(devices))),
        "CUDA_VISIBLE_DEVICES": ",".join(visible[index] if visible else str(index) for index in gpus),
        DEVICE_VARIABLE: str(device),
    }

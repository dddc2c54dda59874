"""The environment variables of computing processes: threads, network interfaces, device and rank."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import site
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from distnb.cluster.connection import CONNECTION_VARIABLE, connection_path
from distnb.process_log import log_environment
from distnb.topology import Device

__all__ = [
    "AGENT_VARIABLE",
    "DEVICE_VARIABLE",
    "ENGINE_VARIABLE",
    "PRELOAD_VARIABLE",
    "PYTHON_MODULE",
    "SHARING_VARIABLE",
    "STORE_VARIABLE",
    "THREADS_VARIABLE",
    "Seat",
    "compute_environment",
    "cores",
    "engines_environment",
    "forwarded_environment",
    "hash_seed",
    "import_environment",
    "is_installed",
    "keep_temporary_sockets_in",
    "rank_environment",
    "script_environment",
    "threads_for",
    "without_task_variables",
]

ENGINE_VARIABLE = "DISTNB_ENGINE_ID"
DEVICE_VARIABLE = "DISTNB_DEVICE"
THREADS_VARIABLE = "DISTNB_THREADS"
SHARING_VARIABLE = "DISTNB_SHARES_CORES"
"""The variable with 1 if an engine's number of threads depends on the number of engines, and not on OMP_NUM_THREADS."""
STORE_VARIABLE = "DISTNB_STORE_FILE"
"""The variable with the path of the file that is the rendezvous store for replicas of a script on this machine."""
AGENT_VARIABLE = "DISTNB_AGENT"
"""The variable with the module whose `install` makes an engine of the process. Tests use a small one."""
PRELOAD_VARIABLE = "DISTNB_PRELOAD"
"""The user's variable with the modules, separated by commas, that engines import before their first program."""

PYTHON_MODULE = (sys.executable, "-P", "-m")
"""The command that runs a module. With -P, a user's file such as random.py does not hide the module of that name."""

_PACKAGE = Path(__file__).parents[2]

# Variables with which launchers describe their own task. The SLURM_JOB_* ones describe the whole job.
_TASK_VARIABLES = re.compile(r"TF_CONFIG|(OMPI|PMIX?|PMI2|PRTE|MPI|MPIR|HYD[A-Z]*)_.*|SLURM_(?!JOB|CONF).*")


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_for(processes: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of threads for each of several computing processes, so that they do not compete for cores.

    If the user set a number in OMP_NUM_THREADS, return it.
    """
    chosen = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(chosen) if chosen.isdigit() and int(chosen) > 0 else max(1, cores() // processes)


def compute_environment(processes: int) -> dict[str, str]:
    """Return the variables of a process that computes on this machine together with others.

    All communication stays on the loopback interface. By default, Gloo and NCCL would listen on a public interface.
    """
    return {
        "OMP_NUM_THREADS": str(threads_for(processes)),
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_RAS_ENABLE": "0",  # an extra port for monitoring, which distnb does not use
        "PYTHONHASHSEED": hash_seed(),
        # Otherwise torch's C++ code warns, in a cell's output, if the machine's address has no name.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        **import_environment(),
    }


def hash_seed() -> str:
    """Return the seed of string hashes. With equal seeds, all replicas loop over a set in the same order.

    In different orders, collectives in the loop's body would not match.
    """
    seed = os.environ.get("PYTHONHASHSEED", "0")
    return seed if seed.isdigit() else "0"


def import_environment() -> dict[str, str]:
    """Return the variables that make a child process import this process's distnb, even from a checkout."""
    package = str(_PACKAGE)
    if package in _site_packages():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}


def is_installed() -> bool:
    """Return whether each process of this Python environment finds this distnb: it is installed, maybe as editable."""
    if str(_PACKAGE) in _site_packages():
        return True
    try:
        source = metadata.distribution("distnb").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    return source is not None and json.loads(source)["url"] == _PACKAGE.as_uri()


def _site_packages() -> tuple[str, ...]:
    return (*site.getsitepackages(), site.getusersitepackages())


def without_task_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables with which a launcher describes its own task.

    An engine is not that task, but libraries in it would use the variables; MPI would even wait for its launcher.
    Slurm's variables about the whole job are kept.
    """
    return {name: value for name, value in environment.items() if not _TASK_VARIABLES.fullmatch(name)}


def keep_temporary_sockets_in(directory: Path) -> None:
    """Make multiprocessing put the sockets of this process into a directory that another process removes.

    By default, multiprocessing creates a directory for each process, which remains if the process is killed.
    """
    multiprocessing.current_process()._config["tempdir"] = str(directory)  # type: ignore[attr-defined]


def forwarded_environment() -> dict[str, str]:
    """Return the notebook's environment variables that all of its engines get, also on other machines."""
    preload = os.environ.get(PRELOAD_VARIABLE)
    return log_environment() | ({} if preload is None else {PRELOAD_VARIABLE: preload})


def engines_environment(engines: int, directory: Path, *, agent: str) -> dict[str, str]:
    """Return the variables that all engines of a cluster on this machine share."""
    return {
        **compute_environment(engines),
        THREADS_VARIABLE: str(threads_for(engines)),
        SHARING_VARIABLE: str(int(not os.environ.get("OMP_NUM_THREADS"))),
        CONNECTION_VARIABLE: str(connection_path(directory)),
        AGENT_VARIABLE: agent,
        **forwarded_environment(),
    }


@dataclass(frozen=True)
class Seat:
    """The position of one worker's replicas in a cluster of machines. By default there is only this worker.

    Attributes:
        store_host, store_port: The address of the rendezvous store. With `store_file`, an address on which no process
            listens, for the script's own use.
        store_file: The file, in a private directory, that is the rendezvous store; "" if the workers use the network.
        worker: The index of this worker.
        workers: The number of workers. All have the same number of replicas.
        network: The variables from `worker_placement.network_environment`; empty to stay on loopback.
    """

    store_host: str
    store_port: int
    store_file: str = ""
    worker: int = 0
    workers: int = 1
    network: Mapping[str, str] = field(default_factory=dict)


def rank_environment(local_rank: int, replicas: int, seat: Seat) -> dict[str, str]:
    """Return torchrun's variables, with torchrun's meanings, for one of a worker's `replicas`."""
    return {
        "RANK": str(seat.worker * replicas + local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(seat.worker),
        "WORLD_SIZE": str(seat.workers * replicas),
        "LOCAL_WORLD_SIZE": str(replicas),
        "MASTER_ADDR": seat.store_host,
        "MASTER_PORT": str(seat.store_port),
        STORE_VARIABLE: seat.store_file,
        # distnb serves the store on one address; torch itself would listen on every interface.
        "TORCHELASTIC_USE_AGENT_STORE": str(not seat.store_file),
        "TORCHELASTIC_RUN_ID": f"distnb-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def script_environment(local_rank: int, device: Device, devices: Sequence[Device], seat: Seat) -> dict[str, str]:
    """Return the whole environment of one replica of a script. `devices` are the devices of its worker's replicas."""
    # Code for torchrun uses `cuda:LOCAL_RANK`, so only the named GPUs are visible, with the numbers from 0 on.
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

"""Distributed PyTorch in notebooks, in the programming model of tf.distribute.

Importing this package loads neither torch nor IPython and starts nothing: every name below is loaded at first use.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent, unless DISTNB_LOG or a handler is set

_WHERE = {
    "start": "distnb.notebook.compose",
    "stop": "distnb.notebook.compose",
    "connect": "distnb.notebook.compose",
    "disconnect": "distnb.notebook.compose",
    "Server": "distnb.machines.engine_server",
    "IPythonParallel": "distnb.machines.transports.ipyparallel_cluster",
    "MPI": "distnb.machines.transports.mpiexec",
    "Ray": "distnb.machines.transports.ray_nodes",
    "SSH": "distnb.machines.transports.ssh",
    "Servers": "distnb.machines.transports.server_transport",
    "Slurm": "distnb.machines.transports.srun",
    "Cluster": "distnb.notebook.session:Session",
    "errors": "distnb.errors:",
    "nn": "distnb.strategies.nn:",
    "metrics": "distnb.metrics:",
    "estimator": "distnb.estimator:",
    "coordinator": "distnb.coordinator:",
    "cluster_resolver": "distnb.cluster_resolver:",
    "keras": "distnb.keras:",
    "partitioners": "distnb.partitioners:",
    "experimental": "distnb.strategies.aliases:experimental",
    "live": "distnb.watching.live",
    "timeline": "distnb.widgets.timeline",
    "history": "distnb.widgets.exports",
    "live_figure": "distnb.widgets.exports",
    "Strategy": "distnb.strategies.base",
    "OneDeviceStrategy": "distnb.strategies.one_device",
    "MirroredStrategy": "distnb.strategies.mirrored",
    "MultiWorkerMirroredStrategy": "distnb.strategies.multi_worker",
    "CentralStorageStrategy": "distnb.strategies.central_storage",
    "ShardedStrategy": "distnb.strategies.sharded",
    "TPUStrategy": "distnb.strategies.tpu",
    "ParameterServerStrategy": "distnb.strategies.parameter_server",
    "ShardedVariable": "distnb.servers.variables.server_variable",
    "CrossDeviceOps": "distnb.collectives.algorithms.base",
    "NcclAllReduce": "distnb.collectives.algorithms.nccl",
    "HierarchicalCopyAllReduce": "distnb.collectives.algorithms.hierarchical_copy",
    "ReductionToOneDevice": "distnb.collectives.algorithms.reduction_to_one_device",
    "Checkpoint": "distnb.checkpoint.checkpoint",
    "CheckpointManager": "distnb.checkpoint.manager",
    "latest_checkpoint": "distnb.checkpoint.manager",
    "elastic": "distnb.checkpoint.elastic",
    "export_safetensors": "distnb.checkpoint.exporting",
    "load_safetensors": "distnb.checkpoint.weight_loading",
    "evaluate_checkpoints": "distnb.checkpoint.evaluating",
    "ReplicaContext": "distnb.strategies.context",
    "get_strategy": "distnb.strategies.context",
    "has_strategy": "distnb.strategies.context",
    "in_cross_replica_context": "distnb.strategies.context",
    "get_replica_context": "distnb.strategies.context",
    "replica_id": "distnb.strategies.context",
    "set_strategy": "distnb.strategies.context",
    "is_chief": "distnb.strategies.context",
    "on_chief": "distnb.strategies.context",
    "shared_folder": "distnb.runtime.chief_work.shared_folder",
    "DistributedValues": "distnb.values",
    "PerReplica": "distnb.values",
    "Mirrored": "distnb.values",
    "Variable": "distnb.strategies.variable_class",
    "VariableAggregation": "distnb.options",
    "VariableSynchronization": "distnb.options",
    "ReduceOp": "distnb.options",
    "RunOptions": "distnb.options",
    "InputOptions": "distnb.options",
    "InputContext": "distnb.options",
    "InputReplicationMode": "distnb.options",
    "AutoShardPolicy": "distnb.options",
    "TensorSpec": "distnb.input.sources.element_spec",
    "DistributedDataset": "distnb.input.dataset",
    "visualize": "distnb.watching.visualizing",
    "DistributedIterator": "distnb.input.dataset",
    "CommunicationImplementation": "distnb.options",
    "CommunicationOptions": "distnb.options",
    "ValueContext": "distnb.options",
}
"""The place of each public name: `module`, `module:other_name`, or `module:` for the module itself."""

__all__ = [*_WHERE, "__version__"]

if TYPE_CHECKING:
    from distnb.checkpoint.checkpoint import Checkpoint as Checkpoint
    from distnb.checkpoint.elastic import elastic as elastic
    from distnb.checkpoint.evaluating import evaluate_checkpoints as evaluate_checkpoints
    from distnb.checkpoint.exporting import export_safetensors as export_safetensors
    from distnb.checkpoint.manager import CheckpointManager as CheckpointManager
    from distnb.checkpoint.manager import latest_checkpoint as latest_checkpoint
    from distnb.checkpoint.weight_loading import load_safetensors as load_safetensors
    from distnb.collectives.algorithms.base import CrossDeviceOps as CrossDeviceOps
    from distnb.collectives.algorithms.hierarchical_copy import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from distnb.collectives.algorithms.nccl import NcclAllReduce as NcclAllReduce
    from distnb.collectives.algorithms.reduction_to_one_device import ReductionToOneDevice as ReductionToOneDevice
    from distnb.input.dataset import DistributedDataset as DistributedDataset
    from distnb.input.dataset import DistributedIterator as DistributedIterator
    from distnb.input.sources.element_spec import TensorSpec as TensorSpec
    from distnb.machines.engine_server import Server as Server
    from distnb.machines.transports.ipyparallel_cluster import IPythonParallel as IPythonParallel
    from distnb.machines.transports.mpiexec import MPI as MPI
    from distnb.machines.transports.ray_nodes import Ray as Ray
    from distnb.machines.transports.server_transport import Servers as Servers
    from distnb.machines.transports.srun import Slurm as Slurm
    from distnb.machines.transports.ssh import SSH as SSH
    from distnb.notebook.compose import connect as connect
    from distnb.notebook.compose import disconnect as disconnect
    from distnb.notebook.compose import start as start
    from distnb.notebook.compose import stop as stop
    from distnb.notebook.session import Session as Cluster  # noqa: F401
    from distnb.options import AutoShardPolicy as AutoShardPolicy
    from distnb.options import CommunicationImplementation as CommunicationImplementation
    from distnb.options import CommunicationOptions as CommunicationOptions
    from distnb.options import InputContext as InputContext
    from distnb.options import InputOptions as InputOptions
    from distnb.options import InputReplicationMode as InputReplicationMode
    from distnb.options import ReduceOp as ReduceOp
    from distnb.options import RunOptions as RunOptions
    from distnb.options import ValueContext as ValueContext
    from distnb.options import VariableAggregation as VariableAggregation
    from distnb.options import VariableSynchronization as VariableSynchronization
    from distnb.runtime.chief_work.shared_folder import shared_folder as shared_folder
    from distnb.servers.variables.server_variable import ShardedVariable as ShardedVariable
    from distnb.strategies.base import Strategy as Strategy
    from distnb.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
    from distnb.strategies.context import ReplicaContext as ReplicaContext
    from distnb.strategies.context import get_replica_context as get_replica_context
    from distnb.strategies.context import get_strategy as get_strategy
    from distnb.strategies.context import has_strategy as has_strategy
    from distnb.strategies.context import in_cross_replica_context as in_cross_replica_context
    from distnb.strategies.context import is_chief as is_chief
    from distnb.strategies.context import on_chief as on_chief
    from distnb.strategies.context import replica_id as replica_id
    from distnb.strategies.context import set_strategy as set_strategy
    from distnb.strategies.mirrored import MirroredStrategy as MirroredStrategy
    from distnb.strategies.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from distnb.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
    from distnb.strategies.parameter_server import ParameterServerStrategy as ParameterServerStrategy
    from distnb.strategies.sharded import ShardedStrategy as ShardedStrategy
    from distnb.strategies.tpu import TPUStrategy as TPUStrategy
    from distnb.strategies.variable_class import Variable as Variable
    from distnb.values import DistributedValues as DistributedValues
    from distnb.values import Mirrored as Mirrored
    from distnb.values import PerReplica as PerReplica
    from distnb.watching.live import live as live
    from distnb.watching.visualizing import visualize as visualize
    from distnb.widgets.exports import history as history
    from distnb.widgets.exports import live_figure as live_figure
    from distnb.widgets.timeline import timeline as timeline


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        from distnb.errors import UnknownNameError
        from distnb.strategies.aliases import NAMES

        if name in NAMES:
            return __getattr__(NAMES[name])
        raise UnknownNameError("distnb", name, _WHERE)
    module, _, inner = _WHERE[name].partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("distnb."):
            raise
        from distnb.features import missing

        raise missing(f"distnb.{name}") from error
    value = loaded if _WHERE[name].endswith(":") else getattr(loaded, inner or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(ipython: Any) -> None:
    """Load the magics: `%load_ext distnb` calls this."""
    from distnb.magics import load_ipython_extension as load

    load(ipython)


def _offer_magics() -> None:
    """Register the magics in a shell that imports distnb, so that the first use of one loads the extension."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is not None:
        for magic in ("distnb", "distribute", "autodistribute"):
            shell.magics_manager.register_lazy(magic, "distnb")


_offer_magics()

"""Private names of Keras: of its models, layers, variables and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from distnb.compat.versions import private_names

try:
    import keras
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise  # its backend is missing
    raise ImportError('distnb.keras needs Keras 3, which is not installed: pip install "distnb[keras]".') from error

with private_names("keras"):
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    # Classes that connect Keras's objects. Keras itself would pickle them as files.
    from keras.src.saving.keras_saveable import KerasSaveable as Saveable
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter
    from keras.src.utils.tracking import TrackedDict, TrackedList, Tracker

    _METHODS = (
        *(keras.Model._flatten_layers, keras.Model._symbolic_build),
        *(keras.Model._get_metrics_result_or_logs, keras.Layer._track_variables),
        *(keras.Variable._direct_assign, keras.Variable._maybe_autocast),
        *(keras.optimizers.Optimizer._filter_empty_gradients, keras.optimizers.Optimizer._clip_gradients),
        keras.optimizers.Optimizer._use_weight_decay,
    )

__all__ = [
    "EVALUATION",
    "LOGS",
    "METRICS_RESULT",
    "SYMBOLIC_BUILD",
    "DataAdapter",
    "Saveable",
    "Tracked",
    "Tracker",
    "added_losses",
    "build",
    "cast_as_layers_do",
    "check_backend",
    "clip",
    "decays",
    "fix_decays",
    "in_graph_order",
    "in_stateless_scope",
    "initial_epoch",
    "is_built",
    "is_tracked",
    "iterations_of",
    "disable_ddp",
    "learning_rate_of",
    "mask_of",
    "optimizer_variables",
    "own_layers",
    "own_variables",
    "parts",
    "plain_embeddings",
    "put_module",
    "put_tensor",
    "set_initial_epoch",
    "set_mask",
    "statistics",
    "table_of",
    "tracked_in",
    "tracked_tensors",
    "tensor_of",
    "track_again",
    "trained_variables",
    "with_layers",
    "with_mask_of",
    "without_missing",
    "wrappers_in",
]

Tracked = (TrackedList, TrackedDict)
_WITH_STATISTICS = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)
SYMBOLIC_BUILD = "_symbolic_build"
METRICS_RESULT = "_get_metrics_result_or_logs"
LOGS = "get_metrics_result"
"""Names of methods of a model that are replaced."""
EVALUATION = "_eval_epoch_iterator"
"""The attribute with the iterator over the data with which `fit` evaluates a model."""


def check_backend() -> None:
    """Raise ImportError if Keras has another backend."""
    if keras.backend.backend() != "torch":
        raise ImportError(
            f"Keras has the backend {keras.backend.backend()!r} here, but distnb's strategies need torch. Set "
            "the environment variable KERAS_BACKEND to torch before Keras is imported."
        )


def mask_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the mask that layers attached to a tensor: the steps of each row that count."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attach a mask to a tensor, and return the tensor."""
    if mask is not None:
        tensor._keras_mask = mask  # type: ignore[attr-defined]
    return tensor


def with_mask_of(part: torch.Tensor, whole: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return some rows of a tensor, with the same rows of its mask."""
    mask = mask_of(whole)
    return set_mask(part, None if mask is None else mask[rows])


def own_layers(model: Any) -> list[Any]:
    """Return all layers in a model, however deep."""
    return list(model._flatten_layers(include_self=False, recursive=True))


def own_variables(metric: Any) -> list[Any]:
    """Return a metric's variables, without those of metrics within it."""
    return list(metric._variables)


def parts(layer: Any) -> list[Any]:
    """Return all layers in a layer, and the other objects it keeps, such as the models that Sequential makes of its
    layers.
    """
    found = {id(each): each for each in own_layers(layer)}
    for each in (layer, *own_layers(layer)):
        found |= {id(kept): kept for kept in each._tracker.config["layers"][1]}
    return list(found.values())


def plain_embeddings(model: Any) -> list[Any]:
    """Return a model's Embedding layers whose call only looks up rows."""
    found = [each for each in own_layers(model) if type(each) is keras.layers.Embedding and each.built]
    return [each for each in found if each.quantization_mode is None and not each.lora_enabled]


def table_of(embedding: Any) -> Any:
    """Return the variable of an Embedding layer."""
    return embedding._embeddings


def tensor_of(variable: Any) -> Any:
    """Return the tensor of a variable, in its own dtype even if layers compute with another."""
    return variable._value


def cast_as_layers_do(variable: Any, tensor: Any) -> Any:
    """Return a variable's tensor in the dtype of the layer that computes, if the layer casts its inputs."""
    return variable._maybe_autocast(tensor)


def put_tensor(variable: Any, tensor: Any) -> None:
    """Replace a variable's tensor by another one with the same content."""
    variable._value = tensor


def is_tracked(layer: Any) -> bool:
    """Return whether the tensors of a layer's variables are registered with torch."""
    return hasattr(layer, "_torch_params")


def tracked_tensors(layer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer's variables that are registered with torch, in a dict that may be changed."""
    found: dict[str, torch.Tensor] = layer._torch_params._parameters
    return found


def put_module(wrapper: Any, module: torch.nn.Module) -> None:
    """Replace the torch module in a layer by a copy. Nothing is notified."""
    wrapper._modules["module"] = module


def track_again(layers: Any) -> None:
    """Register the current tensors of layers' variables with torch."""
    for each in layers:
        each._track_variables()


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer keeps, without reading them from elsewhere."""
    return list(optimizer._variables)


def trained_variables(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built with."""
    return list(optimizer._trainable_variables)


def learning_rate_of(optimizer: Any) -> Any:
    """Return an optimizer's learning rate: a variable, or a schedule."""
    return optimizer._learning_rate


def iterations_of(optimizer: Any) -> Any:
    """Return the variable that counts an optimizer's steps."""
    return optimizer._iterations


def decays(optimizer: Any, variable: Any) -> bool:
    """Return whether an optimizer decays a variable."""
    return bool(optimizer._use_weight_decay(variable))


def fix_decays(optimizer: Any, decaying: Mapping[int, bool]) -> None:
    """Set for each variable, by identity, whether an optimizer decays it, instead of its own decision by name."""
    optimizer._exclude_from_weight_decay_cache = dict(decaying)


def without_missing(optimizer: Any, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return gradients and their variables, without variables that have no gradient."""
    found, its = optimizer._filter_empty_gradients(gradients, variables)
    return list(found), list(its)


def clip(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Return gradients as an optimizer clips them."""
    return list(optimizer._clip_gradients(gradients))


def build(model: Any, batch: Any) -> None:
    """Build a model, its metrics and its optimizer, for a batch or without one."""
    model._symbolic_build(data_batch=batch)


def in_graph_order(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer's attributes in an order in which a graph of layers is pickled from its inputs on, not
    recursively.
    """
    cut: dict[str, Any] = {"_outbound_nodes": []} if "_outbound_nodes" in state else {}
    return dict(sorted({**state, **cut}.items(), key=lambda item: item[0] not in ("_layers", "_operations")))


def added_losses(layer: Any) -> list[Any]:
    """Return the list of the losses that a layer added in its last call."""
    losses: list[Any] = layer._losses
    return losses


def with_layers(layer: Any) -> list[Any]:
    """Return a layer and all layers in it, however deep."""
    return list(layer._flatten_layers())


def statistics(layer: Any) -> tuple[list[Any], list[Any]]:
    """Return the variables that a layer and the layers in it may change in a call, and that are not combined when they
    are assigned or read: those that Keras's own layers made, and those of other layers.
    """
    keras_own: list[Any] = []
    others: list[Any] = []
    for each in with_layers(layer):
        made_by_keras = type(each).__module__.startswith("keras.") or isinstance(each, _WITH_STATISTICS)
        state = [variable for variable in each._non_trainable_variables if type(variable._value) is torch.nn.Parameter]
        (keras_own if made_by_keras else others).extend(state)
    return keras_own, others


def initial_epoch(model: Any) -> int | None:
    """Return the epoch at which BackupAndRestore resumes."""
    found: int | None = model._initial_epoch
    return found


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Set the epoch at which `fit` starts."""
    model._initial_epoch = epoch


def is_built(model: Any) -> bool:
    """Return whether a model and everything that it was compiled with can be built without a batch."""
    compiled = (model._compile_metrics, model._compile_loss)
    return all(each.built for each in model._flatten_layers()) and all(each is None or each.built for each in compiled)


def disable_ddp(model: Any) -> None:
    """Disable Keras 3.16's own use of a process group: it wraps models in DistributedDataParallel and sums metrics."""
    own: Any = next((cls for cls in type(model).__mro__ if "_initialize_ddp" in vars(cls)), None)
    if own is None:
        return
    model._initialize_ddp = lambda: None
    if type(model).get_metrics_result is vars(own).get("get_metrics_result"):
        model.get_metrics_result = super(own, model).get_metrics_result


def has_plain_logs(model: Any) -> bool:
    """Return whether a model's steps return the results of its metrics as they are."""
    names = ("train_step", "test_step", "compute_metrics", LOGS)
    return all(getattr(type(model), name) is getattr(keras.Model, name) for name in names)


def wrappers_in(layer: Any) -> list[Any]:
    """Return the layers in a Keras layer that wrap torch modules, with the layer itself."""
    found = [layer, *own_layers(layer)]
    return [each for each in found if isinstance(each, keras.layers.TorchModuleWrapper)]


def tracked_in(layer: Any) -> list[Any]:
    """Return the layer and the layers in it whose variables' tensors are registered with torch."""
    found = {id(each): each for each in (layer, *parts(layer))}
    return [each for each in found.values() if is_tracked(each)]

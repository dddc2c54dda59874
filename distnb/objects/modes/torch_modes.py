"""The modes of torch, and the random state of its default generator."""

from __future__ import annotations

import functools
from typing import Any

import torch

from distnb.compat.torch_internals import (
    PRINT_OPTS,
    cudnn_benchmark,
    cudnn_deterministic,
    default_device,
    deterministic,
    deterministic_warns,
    matmul_precision,
)
from distnb.objects.modes.mode import Mode
from distnb.objects.rng_state import generator_state

__all__ = ["MODES", "random_state", "raw_modes"]


def _default_device() -> str | None:
    device = default_device()
    return None if device is None else str(device)


_inference_entered: list[tuple[bool, Any]] = []


def _set_inference(on: bool) -> None:
    """Enter inference mode, or leave it by the guard that entered it."""
    if _inference_entered and _inference_entered[-1][0] != on:
        _inference_entered.pop()[1].__exit__(None, None, None)
        return
    guard = torch.inference_mode(on)
    guard.__enter__()
    _inference_entered.append((on, guard))


@functools.cache
def _autocast_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()  # asking for every device that torch knows takes 15 µs
    return tuple({"cpu": 0, "cuda": 0, accelerator.type if accelerator is not None else "cpu": 0})


def _autocast() -> list[tuple[Any, ...]]:
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    return [(device, enabled(device), dtype(device)) for device in _autocast_devices()]


def _set_autocast(value: list[tuple[Any, ...]]) -> None:
    for device, enabled, dtype in value:
        torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_enabled(device, enabled)
    torch.clear_autocast_cache()


def _deterministic() -> tuple[bool, bool]:
    on = torch.are_deterministic_algorithms_enabled()
    return on, on and torch.is_deterministic_algorithms_warn_only_enabled()


def _matmul_precision() -> Any:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the mode was set by `fp32_precision` of one or more backends
        backends: Any = torch.backends
        return backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision


def _set_matmul_precision(value: Any) -> None:
    if isinstance(value, str):
        torch.set_float32_matmul_precision(value)
    else:
        backends: Any = torch.backends
        backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision = value


def _set_cudnn_benchmark(on: bool) -> None:
    torch.backends.cudnn.benchmark = on


def _set_cudnn_deterministic(on: bool) -> None:
    torch.backends.cudnn.deterministic = on


def _printing() -> dict[str, Any]:
    return dict(vars(PRINT_OPTS))


def _set_random_state(state: bytes) -> None:
    generator = torch.default_generator
    wanted = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    seed_before = generator.initial_seed()
    generator.set_state(wanted)
    seed = generator.initial_seed()
    if seed != seed_before or torch.equal(torch.Generator().manual_seed(seed).get_state(), wanted):
        torch.manual_seed(seed)  # a user who seeds torch seeds the generators of all devices
        generator.set_state(wanted)


random_state = functools.partial(generator_state, torch.default_generator)


def raw_modes() -> tuple[Any, ...]:
    """Return the modes below that are compared around calls, without the random state. See `environment._raw_modes`."""
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    try:
        precision = matmul_precision()
    except RuntimeError:
        precision = _matmul_precision()
    return (
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        default_device(),
        *map(enabled, _autocast_devices()),
        *map(dtype, _autocast_devices()),
        deterministic(),
        deterministic_warns(),
        precision,
        cudnn_benchmark(),
        cudnn_deterministic(),
    )


MODES: tuple[Mode, ...] = (
    Mode(name="default dtype", capture=torch.get_default_dtype, apply=torch.set_default_dtype, early=True),
    Mode(name="inference mode", capture=torch.is_inference_mode_enabled, apply=_set_inference),
    Mode(name="gradients", capture=torch.is_grad_enabled, apply=torch.set_grad_enabled),
    Mode(name="default device", capture=_default_device, apply=torch.set_default_device),
    Mode(name="autocast", capture=_autocast, apply=_set_autocast),
    Mode(
        name="deterministic algorithms",
        capture=_deterministic,
        apply=lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    Mode(name="matmul precision", capture=_matmul_precision, apply=_set_matmul_precision),
    Mode(name="cudnn benchmark", capture=cudnn_benchmark, apply=_set_cudnn_benchmark),
    Mode(name="cudnn deterministic", capture=cudnn_deterministic, apply=_set_cudnn_deterministic),
    Mode(
        name="torch printing",
        capture=_printing,
        apply=lambda options: torch.set_printoptions(**options),
        when="beginning",
    ),
    Mode(
        name="torch random state",
        capture=random_state,
        apply=_set_random_state,
    ),
)

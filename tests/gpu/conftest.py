"""Fixtures for tests that need a CUDA device. Elsewhere each is skipped with the reason."""

from __future__ import annotations

import os

import pytest


def _reason_to_skip() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "no CUDA device" + (
            f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else " on this machine"
        )
    return None


@pytest.fixture(autouse=True, scope="session")
def _cuda() -> None:
    if reason := _reason_to_skip():
        pytest.skip(reason)

"""The ranks' program of test_gradients.py."""

from __future__ import annotations

import os
import traceback

import pytest
import torch

from tests.core.collectives.gradient_cases import errors, participation, passes, plain  # noqa: F401  (they fill CASES)
from tests.core.collectives.gradient_cases.group import NotedGroup
from tests.core.collectives.gradient_cases.replica import CASES, Replica

__all__ = ["run_cases"]


def run_cases() -> dict[str, str | None]:
    """Run every case on this replica, and return its name and the traceback if it failed."""
    torch.set_default_dtype(torch.float64)
    wanted = os.environ.get("DISTNB_TEST_CASES", "")
    group = NotedGroup()
    results: dict[str, str | None] = {}
    for name, function in CASES.items():
        if wanted and name not in wanted.split(","):
            continue
        replica = Replica(group)
        print(name, flush=True)
        try:
            function(replica)
            results[name] = None
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()
            print(results[name], flush=True)
        replica.sync.detach()
        outcome = group.all_gather_object(results[name])
        if any(outcome):
            results[name] = "\n".join(f"replica {i}: {text}" for i, text in enumerate(outcome) if text)
    return results

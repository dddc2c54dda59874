"""Engines of other machines start without a zygote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _engines_load_what_they_use() -> Iterator[None]:
    """Load torch._dynamo on the engines that step an optimizer only: few do, and it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTNB_PRELOAD", "")
        yield

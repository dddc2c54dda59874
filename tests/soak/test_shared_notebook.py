"""The shared notebook is in its initial state for each module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import Shared

pytestmark = [pytest.mark.processes, pytest.mark.soak]


def test_the_shared_notebook_is_cleared_and_a_broken_one_is_replaced(tmp_path: Path) -> None:
    shared = Shared(tmp_path)
    try:
        first = shared.take()
        first.run("import os, torch\nx = 1\nos.environ['LEFT'] = '1'\ntorch.set_default_dtype(torch.float64)")
        first.run("%%distribute mirrored\ny = x + 1")
        shared.clear()
        assert shared.take() is first
        assert first.value("{'x', 'y', 'os'} & globals().keys()") == set()
        first.run("%%distribute mirrored\nimport os, torch\nfound = os.environ.get('LEFT'), str(torch.ones(1).dtype)")
        assert first.value("found") == (None, "torch.float32")
        first.run("%distnb stop\n%distnb start -n 1", timeout_s=90)
        with pytest.raises(AssertionError):
            shared.clear()
        assert shared.take() is not first
    finally:
        shared.close()

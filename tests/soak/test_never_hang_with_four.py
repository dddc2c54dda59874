"""The never-hang tests, which use two engines elsewhere, with four."""

import pytest

from tests.core.notebook.test_never_hang import *  # noqa: F403
from tests.core.notebook.test_never_hang import notebook, notebooks  # noqa: F401

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170), pytest.mark.soak]


@pytest.fixture(scope="module")
def engines() -> int:
    return 4

"""Plans of calls on a single engine, whose results nothing compares."""

from __future__ import annotations

import pytest

from tests.support.planned_programs import counted_plans
from tests.support.sessions import started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


def test_a_container_that_holds_itself_stays_on_its_replica() -> None:
    with started(1) as session:
        namespace = session.user_ns
        exec("def act():\n    made = []\n    made.append(made)\n    return made", namespace)
        with counted_plans() as planned:
            found = [namespace["strategy"].run(namespace["act"]) for _ in range(3)]
        assert planned
        assert len({type(each) for each in found}) == 1
        assert all(len(each) == 1 for each in found)

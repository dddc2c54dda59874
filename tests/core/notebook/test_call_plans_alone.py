"""Plans of calls on engines of their own: on a single one, whose results nothing compares, and on some that end."""

from __future__ import annotations

import os

import pytest

from distnb.notebook.session import Session
from tests.support.planned_programs import compare, counted_plans
from tests.support.sessions import lose, started

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


def kill(session: Session) -> None:
    """Kill an engine, and replace it."""
    os.environ.pop("DNB_PLANNED", None)  # the new process would begin with it
    lose(session, 1)
    session.restart(missing=True)


def resize(session: Session) -> None:
    """Add an engine, or remove it again."""
    os.environ.pop("DNB_PLANNED", None)
    session.resize(5 - len(session.status()))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_plans_do_not_outlive_engines(capfd: pytest.CaptureFixture[str]) -> None:
    with started() as session:
        assert sum(compare(session, seed, capfd, 40, [kill, resize]) for seed in range(20)) > 200

"""Engines that end because nobody uses them, and start again with copies of their objects."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

import distnb
from distnb.errors import NoClusterError, OptionError, StaleHandleError
from tests.support.processes import wait_until
from tests.support.sessions import run_cell, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

MAKE = """
torch.manual_seed(0)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    seen = distnb.metrics.Mean()
own = torch.full((2,), float(distnb.replica_id()))
history = []

def step(batch):
    loss = distnb.nn.compute_average_loss(model(batch).square().sum(dim=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen.update(float(distnb.replica_id()))

batches = iter(strategy.distribute_dataset(torch.arange(48.0).reshape(16, 3) / 48, batch_size=4))
"""

TRAIN = """
for _ in range(2):
    strategy.run(step, args=(next(batches),))
history.append(float(seen.compute()))
result = [p.detach().tolist() for p in model.parameters()]
"""


def trained(*, sleeps: bool, capsys: pytest.CaptureFixture[str]) -> tuple[Any, Any, Any]:
    with started(2, **({"idle_timeout": "2s"} if sleeps else {})) as session:
        run_cell(session, MAKE, "make")
        run_cell(session, TRAIN, "train")
        if sleeps:
            pids = [row.pid for row in session.status()]
            shown = ""

            def asleep() -> bool:
                nonlocal shown
                shown += capsys.readouterr().err
                return "nobody used them" in shown

            wait_until(asleep, 60.0)
            assert not any(map(psutil.pid_exists, pids))
            assert (
                "nobody used them for 2.0 s. %distnb restart starts them again, with copies of their objects" in shown
            )
            assert "except `own`, which is lost" in shown
            for use in (lambda: run_cell(session, "x = 1", "again"), lambda: session.resize(3)):
                with pytest.raises(NoClusterError, match="%distnb restart"):
                    use()
            with pytest.raises(NoClusterError, match="%distnb restart"):
                session.user_ns["model"].state_dict()
            assert session.restart() == (0, 1)
            with pytest.raises(StaleHandleError, match="`own`"):
                session.user_ns["own"].numpy()
        run_cell(session, TRAIN + "strategy.assert_in_sync([model, optimizer])", "train")
        names = session.user_ns
        return names["result"], names["history"], float(names["seen"].compute())


def test_idle_engines_end_and_a_restart_continues_as_if_nothing_had_happened(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert trained(sleeps=True, capsys=capsys) == trained(sleeps=False, capsys=capsys)


def test_a_busy_engine_is_not_idle() -> None:
    with started(1, idle_timeout=0.5) as session:
        run_cell(session, "import time\ntime.sleep(1.5)\nx = 3", "busy")
        assert session.user_ns["x"] == 3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"idle_timeout": "soon"}, "'soon' is not a duration"),
        ({"idle_timeout": 0}, "0 is not a duration"),
        ({"idle_timeout": "20m", "detach": True}, "not for a detached cluster"),
        ({"idle_timeout": "20m", "workers": 1, "ps": 1}, "parameter servers"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(OptionError, match=error):
        distnb.start(**options)

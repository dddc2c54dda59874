"""Training outside `strategy.run`: all replicas compute the same, and nothing is summed."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

_PROGRAM = """
import distnb, torch
from distnb.errors import GradientError, CollectiveError

strategy = distnb.MirroredStrategy()
with strategy.scope():
    net = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(100.0)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)

def step(factor=1.0):
    sgd.zero_grad()
    (net(torch.ones(1, 1)) * factor).sum().backward()
    sgd.step()
    return net.weight.item()

result = {"outside": step()}
(net(torch.ones(1, 1))).sum().backward()  # on top of the last gradient
sgd.step()
result["accumulated"] = net.weight.item()
with strategy.scope():
    result["in scope"] = step()
strategy.run(step)
result["in run"] = net.weight.item()
strategy.assert_in_sync(net)
if strategy.num_replicas_in_sync > 1:
    try:
        step(1.0 + distnb.replica_id())
    except GradientError as error:
        result["error"] = str(error)
    result["after the error"] = step()
"""


@pytest.mark.parametrize("n", [1, 2])
def test_an_optimizer_step_outside_run_happens_once(n):
    for rank in run_ranks(_PROGRAM, n=n, timeout_s=170):
        found = rank.check().result
        assert found["outside"] == 99.0
        assert found["accumulated"] == 97.0
        assert found["in scope"] == 96.0
        assert found["in run"] == 96.0 - n
        if n > 1:
            assert "strategy.run(step" in found["error"]
            assert found["after the error"] == 95.0 - n

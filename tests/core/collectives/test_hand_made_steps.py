"""Steps outside torch's optimizers: by hand, line searches, and steps within a backward pass."""

from __future__ import annotations

import warnings

import pytest

from distnb.errors import UnsyncedGradientError
from tests.support.sessions import run_cell, started

pytestmark = pytest.mark.processes

_MODEL = """
with strategy.scope():
    net = torch.nn.Linear(2, 1)
    other = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
data = torch.ones(3, 2) * (1 + distnb.replica_id())
def step():
    sgd.zero_grad()
    net(data).square().sum().backward()
    sgd.step()
for _ in range(3):
    strategy.run(step)
"""
_HAND_MADE = """
def by_hand():
    gradients = torch.autograd.grad(net(data).square().sum(), list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients):
            parameter -= 0.1 * gradient
strategy.run(by_hand)
"""
_LINE_SEARCH = """
torch.manual_seed(0)
inputs, wanted = torch.randn(8, 2), torch.randn(8, 1)
with strategy.scope():
    fitted = torch.nn.Linear(2, 1)
    lbfgs = torch.optim.LBFGS(fitted.parameters(), line_search_fn="strong_wolfe")
def fit():
    context = distnb.get_replica_context()
    mine = slice(context.replica_id_in_sync_group, None, context.num_replicas_in_sync)
    def closure():
        lbfgs.zero_grad()
        loss = (fitted(inputs[mine]) - wanted[mine]).square().sum()
        loss.backward()
        return RETURNED
    return lbfgs.step(closure)
with torch.no_grad():
    before = (fitted(inputs) - wanted).square().sum().item()
first = strategy.local_results(strategy.run(fit))[0].item()
strategy.run(fit)
strategy.assert_in_sync(fitted)
with torch.no_grad():
    left = round((fitted(inputs) - wanted).square().sum().item(), 4)
    ones = torch.cat([inputs, torch.ones(8, 1)], 1)
    best = round((ones @ torch.linalg.lstsq(ones, wanted).solution - wanted).square().sum().item(), 4)
"""
_IN_BACKWARD = """
def within():
    handles = [p.register_post_accumulate_grad_hook(lambda p: sgd.step()) for p in net.parameters()]
    try:
        net(data).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
strategy.run(within)
"""


@pytest.fixture(scope="module")
def session():
    with started(2) as made:
        run_cell(made, _MODEL, "<model>")
        yield made


def test_variables_that_differ_at_the_end_of_a_cell_are_named(session):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_cell(session, "for _ in range(2):\n    strategy.run(step)\n", "<as usual>")
    with pytest.warns(UserWarning, match=r"differ between replicas.*parameter 0 of Linear.*all_reduce") as warned:
        run_cell(session, _HAND_MADE, "<by hand>")
    assert "Linear 2" not in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_cell(session, "net.load_state_dict(strategy.broadcast(net.state_dict()))", "<the cure>")
        run_cell(session, "strategy.assert_in_sync(net)\nstrategy.run(step)", "<as usual again>")


def test_a_change_by_one_replica_only_is_named(session):
    cell = "with torch.no_grad():\n    if distnb.replica_id() == 1:\n        other.bias.add_(1)\n"
    with pytest.warns(UserWarning, match=r"parameter 1 of Linear 2 \[1\]"):
        run_cell(session, cell, "<one only>")


def test_an_equal_change_before_an_error_of_one_replica_is_not_named(session):
    cell = "with torch.no_grad():\n    other.bias.add_(1)\nif distnb.replica_id() == 1:\n    raise ValueError('mine')\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="mine"):
            run_cell(session, cell, "<an error>")
        run_cell(session, "1", "<the next cell>")
        run_cell(session, "strategy.run(step)", "<a step>")


@pytest.mark.parametrize("returned", ["loss", "context.all_reduce('sum', loss.detach())"])
def test_a_line_search_uses_the_global_loss(session, returned):
    run_cell(session, _LINE_SEARCH.replace("RETURNED", returned), "<line search>")
    assert session.user_ns["first"] == pytest.approx(session.user_ns["before"])
    assert session.user_ns["left"] == pytest.approx(session.user_ns["best"], rel=1e-3)


def test_a_step_within_the_backward_pass_is_refused(session):
    with pytest.raises(UnsyncedGradientError, match=r"still under way.*after loss.backward"):
        run_cell(session, _IN_BACKWARD, "<within>")

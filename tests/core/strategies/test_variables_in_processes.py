"""Variables on real replicas: contexts, gradients, buffers, drift."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

_PRELUDE = """
import distnb
strategy = distnb.MirroredStrategy(check_mean_loss=False)
me, n = distnb.replica_id(), strategy.num_replicas_in_sync
result = {}

def error(call):
    try:
        call()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return None

def variable(*args, **options):
    with strategy.scope():
        return distnb.Variable(*args, **options)
"""


def ranks(program: str, n: int = 2) -> list[Any]:
    import textwrap

    ended = run_ranks(_PRELUDE + textwrap.dedent(program), n, timeout_s=120)
    return [rank.check().result for rank in ended]


def test_variables_work_across_replicas_and_outside_the_scope() -> None:
    found = ranks(
        """
        write, total = variable([1.0, 2.0], aggregation="sum"), variable(0, synchronization="on_read", aggregation="sum")
        mean = variable(1.0, synchronization="on_read", aggregation="mean")
        initial = variable(float(me))
        result["initial"] = initial.item()
        result["assigned"] = write.assign(5.0).tolist()
        result["per replica"] = error(lambda: write.assign(distnb.PerReplica([1.0, 2.0])))
        result["sum"] = (total.assign(4).item(), strategy.run(lambda: total.item()), int(total))
        result["odd"] = (total.assign(5).item(), strategy.run(lambda: total.item()).values, total.assign(4).item())
        result["added"] = error(lambda: total.assign_add(2))
        result["in place"] = error(lambda: total.mul_(2))
        result["in a list"] = error(lambda: torch._foreach_add_([total], 1))  # as optimizers do it
        result["out"] = error(lambda: torch.add(torch.ones(()), 1, out=mean))
        result["mean"] = (float(mean.assign(6.0)), strategy.run(lambda: mean.item()), float(mean.assign_add(1.0)))
        strategy.run(lambda: total.assign_add(distnb.replica_id()))
        result["torch"] = [(total + 1).item(), torch.stack([total, total]).tolist(), total.tolist(), total == 5]
        result["shape"] = (total.shape, total.dtype, repr(total))
        result["reduce"] = [strategy.reduce("sum", each, axis=None).tolist() for each in (total, write)]
        result["local"] = strategy.local_results({"v": total})[0]["v"].item()
        result["returned"] = strategy.run(lambda: (write, total.assign_add(0))) == (write, total)
        result["context"] = distnb.in_cross_replica_context()
        result["lazy"] = strategy.run(lambda: distnb.Variable(float(distnb.replica_id() + 5))).item()

        result["unlike"] = error(lambda: variable(1.0, aggregation="sum" if me else "mean"))

        default = distnb.Variable(1.0)
        one = distnb.OneDeviceStrategy("cpu:0")
        with one.scope():
            other = distnb.Variable(1.0)
            result["read there"], result["written there"] = error(write.read_value), error(lambda: total.assign(2))
            reads = lambda: write + 1, lambda: torch.stack([write, other]), lambda: write.add_(1), lambda: total + write
            result["used there"] = [error(read) for read in reads]
            result["facts"] = (list(write.shape), str(write.dtype), write.grad, write.requires_grad), (other + default).item()
        result["used after"] = (write + 1).tolist(), strategy.run(lambda: (write + 1).tolist()), type(write + 1).__name__
        result["mixed"] = [error(lambda: strategy.run(step)) for step in (lambda: other + 1, lambda: other.assign(1))]
        result["default"] = error(lambda: strategy.run(lambda: default.assign_add(1)))

        # A strategy trains central another one, whose variables have gradients that were not used yet.
        central = distnb.CentralStorageStrategy()
        with central.scope():
            model = torch.nn.Linear(2, 1)
        strategy.run(lambda: write.sum().backward())
        result["central"] = error(lambda: central.run(lambda: model(torch.ones(2)).backward()))
        result["gradients"] = write.grad.tolist(), model.weight.grad.tolist()
        """
    )
    for rank, one in enumerate(found):
        assert one["initial"] == 0.0
        assert one["assigned"] == [5.0, 5.0]
        assert "strategy.reduce" in one["per replica"]
        assert one["sum"] == (4, 2, 4)
        assert one["odd"] == (5, ((3, 2)[rank],), 4)
        assert all("ContextError" in one[name] for name in ("added", "in place", "in a list", "out"))
        assert one["mean"] == (6.0, 6.0, 7.0)
        assert one["torch"][:3] == [6, [5, 5], 5]
        assert bool(one["torch"][3])
        assert one["shape"][:2] == ((), found[0]["shape"][1])
        assert f"component tensor({2 + rank})" in one["shape"][2]
        assert one["reduce"] == [5, [10.0, 10.0]]
        assert one["local"] == 2 + rank
        assert one["returned"]
        assert not one["context"]
        assert one["lazy"] == 5.0
        assert "replica 0: Variable (ON_WRITE, MEAN), float32[]" in one["unlike"]
        assert "replica 1: Variable (ON_WRITE, SUM), float32[]" in one["unlike"]
        texts = [one["read there"], one["written there"], *one["mixed"], *one["used there"]]
        assert all(text is not None and "Mixing different Strategy objects" in text for text in texts), texts
        assert one["facts"] == (([2], "torch.float32", None, True), 2.0)
        assert one["used after"] == ([6.0, 6.0], [6.0, 6.0], "Tensor")
        assert "with strategy.scope()" in one["default"]
        assert one["central"] is None
        assert one["gradients"] == ([2.0, 2.0], [[2.0, 2.0]])


def test_variables_can_be_trained_and_saved_in_modules() -> None:
    found = ranks(
        """
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = distnb.Variable([1.0, 2.0])
                self.steps = distnb.Variable(0, aggregation="only_first_replica")
                self.seen = distnb.Variable(0.0, synchronization="on_read", aggregation="sum")
                self.mean = distnb.Variable(0.0, synchronization="on_read", aggregation="mean")
                self.late = None

            def forward(self, x):
                if self.late is None:
                    self.late = distnb.Variable([float(distnb.replica_id())] * 2)  # in the first forward
                self.steps.assign_add(1)
                self.seen.assign_add(x)
                self.mean.assign(x)
                return (self.weight * x).sum() + (self.late * x).sum()

        with strategy.scope():
            model = Model()
        optimizers = []

        def step(x):
            loss = model(x)
            if not optimizers:
                optimizers.append(torch.optim.SGD(model.parameters(), lr=1.0))
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
        x = strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group + 1.0)
        for _ in range(2):
            strategy.run(step, args=(x,))
        saved = model.state_dict()
        result["saved"] = {name: value.tolist() for name, value in saved.items()}
        model.load_state_dict(saved)
        result["again"] = {name: value.tolist() for name, value in model.state_dict().items()}
        strategy.assert_in_sync(model)
        model.double()
        result["converted"] = {name: value.tolist() for name, value in model.state_dict().items()}
        """
    )
    # Two steps of gradient 1 + 2 each; replica 0's first value of the late one.
    expected = {"weight": [-5.0, -4.0], "steps": 2, "seen": 6.0, "mean": 1.5, "late": [-6.0, -6.0]}
    for one in found:
        assert one["saved"] == one["again"] == one["converted"] == expected


def test_a_script_warns_of_changes_by_hand_that_differ() -> None:
    """Change a model by hand: differently on each replica, and equally."""
    found = ranks(
        """
        import warnings

        def change(by):
            with torch.no_grad():
                model.weight.sub_(by)

        for name, by in (("unlike", me + 1.0), ("alike", 1.0)):
            with strategy.scope():
                model = torch.nn.Linear(1, 1)
            for _ in range(2):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    strategy.run(change, args=(by,))
            result[name] = [str(one.message) for one in caught]
        """
    )
    assert [len(each["unlike"]) for each in found] == [1, 0]
    assert found[0]["unlike"][0].startswith("Mirrored variables differ between replicas since an earlier strategy.run")
    assert [each["alike"] for each in found] == [[], []]


def test_a_script_ends_if_only_some_replicas_change_parameters_by_hand() -> None:
    found = ranks(
        """
        from distnb.errors import CollectiveMismatchError

        def step():
            if me == 1:
                with torch.no_grad():
                    model.weight.sub_(1.0)
            return torch.tensor(me)

        with strategy.scope():
            model = torch.nn.Linear(1, 1)
        try:
            for run in range(4):
                strategy.reduce("sum", strategy.run(step), axis=None)
        except CollectiveMismatchError as error:
            result["run"], result["notes"] = run, getattr(error, "__notes__", [])
        """
    )
    assert [each["run"] for each in found] == [1, 1]
    [note] = found[1]["notes"]
    assert "changed by hand, here parameter 0 of Linear" in note
    assert "Make the same changes on every replica." in note


def test_buffers_are_the_replicas_own_and_drift_is_named() -> None:
    found = ranks(
        """
        class Last(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("seen", torch.zeros(1))
            def forward(self, x):
                self.seen.copy_(x.mean(0))

        with strategy.scope():
            plain, model = torch.nn.Sequential(Last()), torch.nn.Linear(3, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)
        batch = strategy.distribute_values_from_function(
            lambda context: torch.tensor([[0.0], [2.0]]) + 10 * context.replica_id_in_sync_group)
        strategy.run(plain, args=(batch,))
        result["saved"] = plain.state_dict()["0.seen"].tolist()
        result["reduced"] = strategy.reduce("mean", plain[0].seen, axis=None).tolist()
        plain.load_state_dict(strategy.broadcast(plain.state_dict()))
        result["restored"] = plain[0].seen.tolist()

        strategy.run(lambda: (model(torch.ones(1, 3)).sum().backward(), optimizer.step(), None)[2])
        strategy.assert_in_sync([model, plain, optimizer])
        with torch.no_grad():
            if me:
                optimizer.state[model.weight]["momentum_buffer"] += 1.0
        result["drift"] = error(lambda: strategy.assert_in_sync([model, optimizer]))
        optimizer.load_state_dict(strategy.broadcast(optimizer.state_dict()))
        strategy.assert_in_sync([model, optimizer])
        """,
        n=3,
    )
    for rank, one in enumerate(found):
        assert (one["saved"], one["reduced"], one["restored"]) == ([1.0 + 10 * rank], [11.0], [1.0])
        assert one["drift"].startswith("OutOfSyncError: The replicas are out of sync: 1 of "), one["drift"]
        assert "SGD['state'][0]['momentum_buffer']: replicas 1, 2" in one["drift"]


def test_batch_norms_trained_on_one_replica_only_are_named() -> None:
    first, second = ranks(
        """
        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
        if me == 1:
            model.eval()
        result["message"] = error(lambda: strategy.run(lambda: model(torch.ones(2, 1)).sum().backward()))
        """,
        2,
    )
    for message in (first["message"], second["message"]):
        assert "replica 0 called BatchNorm's running statistics(float32[2], float32[2])" in message


def test_the_program_in_the_documentation_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "variables.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert {rank.check().stdout for rank in run_ranks(program, 2)} == {"3 steps, 10 examples\n"}


def test_the_error_for_reading_on_one_replica_alone_names_the_cure() -> None:
    first, _ = run_ranks(
        _PRELUDE
        + """
with strategy.scope():
    total = distnb.Variable(0, synchronization="on_read", aggregation="sum")
if me == 0:
    try:
        int(total)
    except distnb.errors.CollectiveMismatchError as error:
        result["message"] = str(error) + "".join(getattr(error, "__notes__", []))
""",
        2,
    )
    assert "before `if distnb.is_chief():`" in first.check().result["message"]


def test_saving_on_one_replica_works_as_in_ddp_scripts() -> None:
    first, second = ranks(
        """
        import torch.distributed as dist

        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
        result["saved"] = len(model.state_dict()) if me == 0 else 0
        dist.barrier()
        """,
        2,
    )
    assert (first["saved"], second["saved"]) == (7, 0)

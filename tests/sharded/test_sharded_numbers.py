"""Options of a ShardedStrategy, and what it refuses. The conformance suite compares its training with plain torch's."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

_COMMON = """
import distnb
import warnings

if "APART" in os.environ:  # as on machines that share no memory
    from distnb.collectives.shared_memory.shared_sum import SharedSum
    SharedSum.of = classmethod(lambda cls, log: None)

torch.set_num_threads(1)
warnings.simplefilter("error")
result = {}


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def error(call):
    try:
        call()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
"""


def ranks(program: str, n: int, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    return [rank.check().result for rank in run_ranks(_COMMON + textwrap.dedent(program), n, timeout_s=140, env=env)]


@pytest.mark.parametrize("env", [{}, {"APART": "1"}])
def test_groups_precision_and_compiled_blocks(env: dict[str, str]) -> None:
    """Train on four replicas: in groups of two, in bfloat16, and with compiled blocks."""
    found = ranks(
        """
        def train(strategy, prepare=lambda model: None):
            torch.manual_seed(7)
            with strategy.scope():
                model = torch.nn.Sequential(*(
                    torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 7)) for _ in range(3)
                ))
                prepare(model)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

            def step(rows):
                optimizer.zero_grad()
                distnb.nn.compute_average_loss(model(rows).square().sum(dim=1)).backward()
                optimizer.step()

            # The last batch has one row, so all replicas but the first have an empty slice.
            rows = torch.randn(17, 7, generator=torch.Generator().manual_seed(3))
            for batch in strategy.distribute_dataset(rows, batch_size=8):
                strategy.run(step, args=(batch,))
            return model

        def apart(model):
            pairs = zip(model.parameters(), expected.parameters(), strict=True)
            return max(float((whole(ours) - theirs.detach()).abs().max()) for ours, theirs in pairs)

        expected = train(distnb.OneDeviceStrategy("cpu:0"))
        model = train(distnb.ShardedStrategy(min_size=0, replicas_per_group=2))
        result["grouped"] = apart(model)
        weight = model[0][0].weight
        result["placements"], result["rows"] = repr(weight.placements), weight.to_local().shape[0]

        half = distnb.ShardedStrategy(min_size=0, mixed_precision="bfloat16")
        model = train(half)
        result["half"] = apart(model)
        seen = []
        model[0][0].register_forward_hook(lambda module, inputs, output: seen.append(module.weight.dtype))
        half.run(lambda: model(torch.ones(2, 7)))
        result["dtypes"] = (seen[0], model[0][0].weight.dtype)

        warnings.simplefilter("ignore")  # the compiler's own
        def compiled(model):
            for block in model:
                block.compile(backend="aot_eager")
        result["compiled"] = apart(train(distnb.ShardedStrategy(min_size=0), compiled))
        """,
        4,
        env,
    )
    for got in found:
        assert got["grouped"] < 1e-5
        assert got["half"] < 0.05
        assert got["compiled"] < 1e-5
        assert got["placements"] == "(Replicate(), Shard(dim=0))"
        assert got["dtypes"] == (torch.bfloat16, torch.float32)
    assert [got["rows"] for got in found] == [7, 6, 7, 6]


def test_what_cannot_be_sharded_raises() -> None:
    """Check the errors, and that training continues after them."""
    found = ranks(
        """
        strategy = distnb.ShardedStrategy(min_size=0)

        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        rows = torch.ones(3, 4)

        def backward():
            optimizer.zero_grad()
            model(rows).square().sum().backward()

        def only_local_gradients():
            with strategy.no_sync():
                backward()

        def only_local():
            only_local_gradients()
            optimizer.step()

        result["no_sync"] = error(lambda: strategy.run(only_local))
        with strategy.scope():
            other = torch.nn.Linear(4, 2)  # no backward pass of its own reduces the first model's gradients
            others = torch.optim.SGD(other.parameters(), 0.1)

        def other_step():
            others.zero_grad()
            other(rows).sum().backward()
            others.step()

        strategy.run(only_local_gradients)
        strategy.run(other_step)
        result["no_sync, later"] = error(lambda: strategy.run(optimizer.step))

        def caught():
            def fail(module, inputs):
                raise RuntimeError("on purpose")

            hook = model[1].register_forward_pre_hook(fail)
            try:
                model(rows)
            finally:
                hook.remove()

        result["caught"] = error(lambda: strategy.run(caught))
        result["after it"] = error(lambda: strategy.run(backward))
        strategy.run(only_local_gradients)
        optimizer.zero_grad()  # discards them
        def different():
            (model(rows) * (distnb.replica_id() + 1)).sum().backward()

        result["outside"] = error(different)
        optimizer.zero_grad()
        result["block"] = error(lambda: distnb.ShardedStrategy(shard_by=7))
        with distnb.ShardedStrategy(min_size=0, shard_by="block").scope() as blocks:
            pass

        def without_blocks():
            with distnb.ShardedStrategy(min_size=0, shard_by="block").scope():
                made = torch.nn.Bilinear(2, 2, 2)

        result["no blocks"] = error(without_blocks)
        chosen = distnb.ShardedStrategy(shard_by=lambda name, module: name == "1")
        with chosen.scope():
            third = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        result["chosen"] = [name for name, module in third.named_modules() if hasattr(module, "unshard")]
        result["mixed"] = error(lambda: strategy.run(lambda: third(rows)))

        # The replicas' own values become replica 0's.
        with strategy.scope():
            fourth = torch.nn.Linear(4, 6)
            with torch.no_grad():
                fourth.weight.fill_(distnb.replica_id() + 1.0)
        result["equal"] = whole(fourth.weight).unique().tolist()

        result["numpy"] = (fourth.weight.detach().numpy().shape, len(fourth.bias.tolist()))
        """,
        2,
    )
    for got in found:
        assert got["no_sync"].startswith("UnsyncedGradientError")
        assert "no_sync() only" in got["no_sync"]
        assert got["no_sync, later"] == got["no_sync"]
        assert got["caught"] == "RuntimeError: on purpose"
        assert got["after it"] is None
        assert got["outside"].startswith("UnsyncedGradientError")
        assert "outside strategy.run" in got["outside"]
        assert "shard_by=7" in got["block"]
        assert "no repeated blocks" in got["no blocks"]
        assert got["chosen"] == ["", "1"]
        assert got["mixed"].startswith("ContextError")
        assert got["equal"] == [1.0]
        assert got["numpy"] == ((6, 4), 6)

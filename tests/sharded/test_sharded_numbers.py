"""A sharded model trains like a whole one: every feature of training, against plain PyTorch in one process."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

_COMMON = """
import copy
import warnings
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
warnings.simplefilter("error")


class Block(torch.nn.Module):
    def __init__(self, width, checkpointed):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 13), torch.nn.Linear(13, width)
        self.checkpointed = checkpointed

    def inner(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))


class Net(torch.nn.Module):
    '''Tokens to tokens: the embedding and the head are tied, one parameter is frozen, and one is a scalar.'''

    def __init__(self, checkpointed=False, tied=True):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 7, padding_idx=0)
        self.blocks = torch.nn.ModuleList(Block(7, checkpointed) for _ in range(3))
        self.blocks[1].up.bias.requires_grad_(False)
        self.head = torch.nn.Linear(7, 11)
        if tied:
            self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.arange(7) % 2 == 0)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def batches():
    generator = torch.Generator().manual_seed(3)
    # The last batch has one row, so all replicas but the first have an empty slice.
    return torch.randint(0, 11, (17, 5), generator=generator), torch.randint(0, 11, (17, 5), generator=generator)


BATCH = 8


def losses_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").unflatten(0, (-1, 5)).sum(1)


def values(model):
    return [whole(each) for each in model.parameters()]


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
"""

_REFERENCE = """
def plain(optimizer, clip=None, accumulate=1, **options):
    torch.manual_seed(7)
    model = Net(**options)
    optimizer = optimizer(model.parameters())
    losses, norms = [], []
    for epoch in range(2):
        for number, (tokens, targets) in enumerate(zip(*(each.split(BATCH) for each in batches()))):
            loss = losses_of(model, tokens, targets).sum() / BATCH
            loss.backward()
            losses.append(loss.item())
            if (number + 1) % accumulate == 0:
                if clip is not None:
                    norms.append(float(torch.nn.utils.clip_grad_norm_([each for each in model.parameters() if each.dim()], clip)))
                optimizer.step()
                optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "values": values(model)}
"""

_SHARDED = """
import contextlib
import distnb


def sharded(strategy, optimizer, clip=None, accumulate=1, prepare=None, **options):
    torch.manual_seed(7)
    with strategy.scope():
        model = Net(**options)
        if prepare is not None:
            prepare(model)
        optimizer = optimizer(model.parameters())
    losses, norms = [], []
    dataset = strategy.distribute_dataset(torch.utils.data.TensorDataset(*batches()), batch_size=BATCH)

    def step(batch, steps):
        loss = distnb.nn.compute_average_loss(losses_of(model, *batch), global_batch_size=BATCH)
        with contextlib.nullcontext() if steps else strategy.no_sync():
            loss.backward()
        if steps:
            if clip is not None:
                norms.append(float(torch.nn.utils.clip_grad_norm_([each for each in model.parameters() if each.dim()], clip)))
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    for epoch in range(2):
        for number, batch in enumerate(dataset):
            steps = (number + 1) % accumulate == 0
            losses.append(strategy.reduce("sum", strategy.run(step, (batch, steps)), axis=None).item())
    return {"losses": losses, "norms": norms, "values": values(model), "model": model, "optimizer": optimizer}
"""


def reference(call: str) -> dict[str, Any]:
    """Return the result of a call of `plain` in this process."""
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        exec(_COMMON + _REFERENCE, names)
        return dict(eval(f"plain({call})", names))


def ranks(program: str, n: int) -> list[dict[str, Any]]:
    ended = run_ranks(_COMMON + _SHARDED + "result = {}\n" + textwrap.dedent(program), n, timeout_s=140)
    return [rank.check().result for rank in ended]


def compare(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got["losses"], expected["losses"], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got["norms"], expected["norms"], atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(got["values"], expected["values"], strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), theirs, atol=tolerance, rtol=tolerance)


CALLS = {
    "momentum": "lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)",
    "adam": "lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-3)",
    "clipped": "lambda p: torch.optim.SGD(p, 0.01), clip=0.7",
    "accumulated": "lambda p: torch.optim.SGD(p, 0.01), accumulate=3",
    "checkpointed": "lambda p: torch.optim.SGD(p, 0.01), checkpointed=True, tied=False",
}


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 4))])
def test_a_sharded_model_trains_like_a_whole_one(n: int) -> None:
    calls = "\n".join(f"result[{name!r}] = kept(sharded(strategy, {call}))" for name, call in CALLS.items())
    program = f"""
strategy = distnb.ShardedStrategy(min_size=0)

def kept(found):
    units = [name for name, module in found["model"].named_modules() if hasattr(module, "unshard")]
    assert units == ["", "blocks.0", "blocks.1", "blocks.2"], units
    return {{key: found[key] for key in ("losses", "norms", "values")}}

{calls}
"""
    found = ranks(program, n)
    for name, call in CALLS.items():
        expected = reference(call)
        for got in found:
            compare(got[name], expected)


def test_groups_precision_and_compiled_blocks() -> None:
    """Train on four replicas: in groups of two, in bfloat16, with compiled blocks, and with averaged gradients."""
    sgd = "lambda p: torch.optim.SGD(p, 0.01)"
    found = ranks(
        f"""
        grouped = distnb.ShardedStrategy(min_size=0, replicas_per_group=2)
        got = sharded(grouped, {CALLS["accumulated"]})
        result["grouped"] = {{key: got[key] for key in ("losses", "norms", "values")}}
        weight = got["model"].blocks[0].up.weight
        result["placements"] = repr(weight.placements)
        result["rows"] = weight.to_local().shape[0]

        half = distnb.ShardedStrategy(min_size=0, mixed_precision="bfloat16")
        got = sharded(half, {sgd})
        result["half"] = {{key: got[key] for key in ("losses", "norms", "values")}}
        seen = []
        got["model"].blocks[0].up.register_forward_hook(lambda module, inputs, output: seen.append(module.weight.dtype))
        half.run(lambda tokens: got["model"](tokens), (batches()[0],))
        result["dtypes"] = (seen[0], got["model"].blocks[0].up.weight.dtype)

        warnings.simplefilter("ignore")  # the compiler's own
        def compiled(model):
            for block in model.blocks:
                block.compile(backend="aot_eager")

        got = sharded(distnb.ShardedStrategy(min_size=0), {sgd}, prepare=compiled)
        result["compiled"] = {{key: got[key] for key in ("losses", "norms", "values")}}

        strategy = distnb.ShardedStrategy(min_size=0, gradient_reduction="mean")
        torch.manual_seed(7)
        with strategy.scope():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
        dataset = strategy.distribute_dataset(torch.utils.data.TensorDataset(*batches()), batch_size=BATCH)

        def step(batch):
            losses = losses_of(model, *batch)
            loss = losses.mean() if len(losses) else losses.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        for epoch in range(2):
            for batch in dataset:
                strategy.run(step, (batch,))
        result["mean"] = values(model)
        """,
        4,
    )
    expected = reference(CALLS["accumulated"])
    whole = reference(sgd)
    for got in found:
        compare(got["grouped"], expected)
        compare(got["half"], whole, tolerance=0.05)
        compare(got["compiled"], whole)
        assert got["placements"] == "(Replicate(), Shard(dim=0))"
        assert got["dtypes"] == (torch.bfloat16, torch.float32)
    assert [got["rows"] for got in found] == [7, 6, 7, 6]
    names: dict[str, Any] = {}
    averaged = "loss = losses_of(model, tokens, targets).sum() / BATCH"
    assert averaged in _REFERENCE
    with torch.random.fork_rng():
        exec(_COMMON + _REFERENCE.replace(averaged, "loss = losses_of(model, tokens, targets).mean()"), names)
        expected = eval(f"plain({sgd})", names)
    for got in found:
        for ours, theirs in zip(got["mean"], expected["values"], strict=True):
            torch.testing.assert_close(torch.as_tensor(ours), theirs, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_sharded_raises() -> None:
    """Check the errors, and that training continues after them."""
    found = ranks(
        """
        strategy = distnb.ShardedStrategy(min_size=0)

        def error(call):
            try:
                call()
            except Exception as raised:
                return f"{type(raised).__name__}: {raised}"

        def lazy():
            with strategy.scope():
                made = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LazyLinear(3))

        warnings.simplefilter("ignore")  # of lazy modules
        result["lazy"] = error(lazy)
        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for name in ("LBFGS", "Muon", "Adafactor"):
            result[name] = error(lambda: getattr(torch.optim, name)([model[0].weight, model[1].weight]))
        rows = torch.ones(3, 4)

        def backward(reduction):
            optimizer.zero_grad()
            getattr(model(rows).square(), reduction)().backward()

        result["mean loss"] = error(lambda: strategy.run(backward, ("mean",)))

        def only_local_gradients():
            with strategy.no_sync():
                backward("sum")

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
        result["after it"] = error(lambda: strategy.run(backward, ("sum",)))
        strategy.run(only_local_gradients)
        optimizer.zero_grad()  # discards them
        model(rows).sum().backward()
        result["equal outside"] = whole(model[0].weight.grad)
        optimizer.zero_grad()

        def different():
            (model(rows) * (distnb.replica_id() + 1)).sum().backward()

        result["outside"] = error(different)
        optimizer.zero_grad()
        result["expected"] = whole(model[1].weight).sum(0)[:, None] * torch.full((6, 4), 3.0)
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
            fifth = torch.optim.Adam(fourth.parameters())
        result["equal"] = whole(fourth.weight).unique().tolist()

        # Whole states are divided when they are loaded.
        plain = torch.nn.Linear(4, 6)
        with torch.no_grad():
            plain.weight.copy_(torch.arange(24.0).view(6, 4))
        adam = torch.optim.Adam(plain.parameters())
        plain(rows).sum().backward()
        adam.step()
        fourth.load_state_dict(plain.state_dict())
        fifth.load_state_dict(adam.state_dict())
        result["loaded"] = torch.equal(whole(fourth.weight), plain.weight.detach())
        result["loaded state"] = torch.equal(
            whole(fifth.state[fourth.weight]["exp_avg"]), adam.state[plain.weight]["exp_avg"]
        )
        result["numpy"] = (fourth.weight.detach().numpy().shape, len(fourth.bias.tolist()))
        """,
        2,
    )
    for got in found:
        assert "has no size yet" in got["lazy"]
        assert all(f"{name} cannot update" in got[name] for name in ("LBFGS", "Muon", "Adafactor"))
        assert got["mean loss"].startswith("MeanLossError")
        assert got["no_sync"].startswith("UnsyncedGradientError")
        assert "no_sync() only" in got["no_sync"]
        assert got["no_sync, later"] == got["no_sync"]
        assert got["caught"] == "RuntimeError: on purpose"
        assert got["after it"] is None
        assert got["outside"].startswith("UnsyncedGradientError")
        assert "outside strategy.run" in got["outside"]
        torch.testing.assert_close(got["equal outside"], got["expected"])
        assert "shard_by=7" in got["block"]
        assert "no repeated blocks" in got["no blocks"]
        assert got["chosen"] == ["", "1"]
        assert got["mixed"].startswith("ContextError")
        assert got["equal"] == [1.0]
        assert got["loaded"]
        assert got["loaded state"]
        assert got["numpy"] == ((6, 4), 6)

"""A sharded model has the values of an ordinary construction. Only replica 0's host holds it whole, or nobody's does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Rank, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

_CONSTRUCTORS = """
import copy
import random
import warnings
import numpy
import distnb
from torch import nn

warnings.simplefilter("ignore")


class Filler(nn.Module):
    '''It takes the memory in which all replicas keep values.'''

    def __init__(self):
        super().__init__()
        self.filler = nn.Parameter(torch.empty(17_000_000).uniform_())


class Initialised(nn.Module):
    '''Parameters initialised in the ways that programs use.'''

    def __init__(self):
        super().__init__()
        self.truncated = nn.Parameter(torch.empty(80, 90))
        nn.init.trunc_normal_(self.truncated, std=0.02)  # reads its own values
        self.wide, self.tall = nn.Parameter(torch.empty(80, 90)), nn.Parameter(torch.empty(90, 80))
        nn.init.orthogonal_(self.wide)
        nn.init.orthogonal_(self.tall)
        self.scaled = nn.Parameter(torch.randn(90, 80) * 0.02)
        self.lower, self.ones = nn.Parameter(torch.zeros(80, 80)), nn.Parameter(torch.ones(80, 80))
        self.kaiming = nn.Parameter(torch.empty(30, 40, 5))
        nn.init.kaiming_normal_(self.kaiming)
        self.sparse, self.eye = nn.Parameter(torch.empty(100, 70)), nn.Parameter(torch.empty(100, 70))
        nn.init.sparse_(self.sparse, 0.2)
        nn.init.eye_(self.eye)
        self.dirac = nn.Parameter(torch.empty(60, 70, 3))
        nn.init.dirac_(self.dirac)
        self.copied = nn.Parameter(torch.empty(80, 80))
        source = torch.arange(6400.0).view(80, 80)
        with torch.no_grad():
            self.copied.copy_(source)
            source.zero_()
            self.copied[1].mul_(2)
            self.copied.data[0] = 5
            self.copied[:, 2] = self.wide[:80, 1]
            self.copied *= torch.rand(80, 80)
            self.copied.copy_(torch.where(self.copied > 3, self.copied, self.copied.T))
            self.tall.copy_(torch.linalg.qr(self.scaled)[0])
            self.lower.copy_(torch.tril(self.wide[:, :80]))
        self.own = nn.Parameter(torch.empty(80, 80).uniform_(generator=torch.Generator().manual_seed(5)))
        self.register_buffer("positions", torch.rand(10, 4))
        self.register_buffer("norms", self.scaled.detach().norm(dim=1))
        self.noise, self.initial = torch.randn(7), self.scaled.detach().clone()
        self.mean = nn.Parameter(self.scaled.detach().mean())
        self.numbers = random.random(), float(numpy.random.rand()), float(self.copied.max())
        self.half, self.brain = nn.Linear(200, 80).half(), nn.Linear(200, 80).to(torch.bfloat16)
        self.again, self.first = nn.Linear(80, 80), nn.Linear(80, 80)
        self.first.weight = self.again.weight
        self.twin = copy.deepcopy(self.again)
        self.apply(self._initialise)

    def _initialise(self, module):
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32:
            nn.init.trunc_normal_(module.weight, 0, 0.3)

    def forward(self, x):
        return x


class Evicted(nn.Module):
    '''Its constructor changes parameters that were made long ago.'''

    def __init__(self):
        super().__init__()
        self.symmetric, self.base = nn.Linear(80, 80), nn.Linear(96, 96)
        self.a, self.b = nn.Parameter(torch.randn(96, 64)), nn.Parameter(torch.randn(64, 96))
        self.drawn = nn.Linear(80, 80)
        self.filler = Filler()
        with torch.no_grad():
            self.symmetric.weight.copy_((self.symmetric.weight + self.symmetric.weight.T) / 2)
            self.base.weight.sub_(self.a @ self.b * torch.rand(96, 96))
            self.drawn.weight[:3].normal_()
            nn.init.trunc_normal_(self.drawn.weight, std=0.02)


def layers():
    return nn.Sequential(
        nn.Embedding(1000, 40, padding_idx=0),
        nn.LSTM(70, 70, 2),
        nn.MultiheadAttention(80, 2),
        nn.Conv2d(30, 40, 5),
        nn.BatchNorm1d(5000),
        nn.Bilinear(20, 30, 40),
        nn.Transformer(80, 2, 2, 2, 160, batch_first=True),
        nn.utils.parametrizations.weight_norm(nn.Linear(80, 90)),
        nn.utils.parametrizations.orthogonal(nn.Linear(80, 90)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(80, 90)),
    )


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def seed():
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)


strategy = distnb.ShardedStrategy()
result = []


def compare(make):
    seed()
    expected_filler, expected, drawn = Filler(), make(), (torch.rand(3).tolist(), random.random())
    seed()
    with strategy.scope():
        filler, got = Filler(), make()
        in_scope = torch.rand(3).tolist()
    assert (in_scope, random.random()) == drawn
    assert torch.equal(whole(filler.filler), expected_filler.filler)
    parameters = dict(got.named_parameters())
    assert list(parameters) == [name for name, _ in expected.named_parameters()]
    for name, ours in expected.named_parameters():
        assert isinstance(parameters[name], nn.Parameter)
        assert parameters[name].requires_grad == ours.requires_grad
        assert torch.equal(whole(parameters[name]), ours), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(got.get_buffer(name), buffer), name
        assert type(got.get_buffer(name)) is torch.Tensor
    result.append(sum(hasattr(each, "full_tensor") for each in parameters.values()))
    return expected, got


expected, got = compare(Initialised)
assert got.numbers == expected.numbers
assert torch.equal(got.noise, expected.noise)
assert torch.equal(got.initial, expected.initial)
assert got.first.weight is got.again.weight
compare(Evicted)
compare(layers)
"""


def test_values_are_those_of_an_ordinary_construction() -> None:
    for rank in run_ranks(_CONSTRUCTORS, 2, timeout_s=150):
        assert min(rank.check().result) >= 6


def test_a_constructor_that_reads_old_values_is_refused_with_a_cure() -> None:
    program = """
    import distnb

    class Reading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.early = torch.nn.Linear(100, 100)
            self.fillers = torch.nn.ParameterList(torch.zeros(9_000_000) for _ in range(6))
            self.largest = float(self.early.weight.abs().max())

    strategy = distnb.ShardedStrategy()
    torch.manual_seed(1)
    with strategy.scope():
        with torch.device("cpu"):
            large, model = torch.nn.Linear(6000, 3000), Reading()
    largest = model.largest
    torch.manual_seed(1)
    large, model = torch.nn.Linear(6000, 3000), Reading()
    assert model.largest == largest
    with strategy.scope():
        large, model = torch.nn.Linear(6000, 3000), Reading()
    """
    first, second = run_ranks(program, 2)
    assert first.returncode != 0
    assert "A program reads a tensor whose values only replica 0 still has" in second.stderr
    assert 'within `with torch.device("cpu"):` in the scope' in second.stderr


_LIMITED = """
import ctypes
import gc
import resource
import distnb

# By default, the C library keeps the memory of freed parameters. See "Memory on the CPU" in docs/sharded.md.
M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000)

torch.set_num_threads(1)
strategy = getattr(distnb, {strategy!r})(check_mean_loss=False)
LAYERS, WIDTH = 20, 2000  # 320 MB


def make(layers, width):
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, model[0].in_features)).sum().backward()
        optimizer.step()

    strategy.run(step)
    tensors = [*model.parameters(), *(each.grad for each in model.parameters())]
    tensors += [part for state in optimizer.state.values() for part in state.values()]
    return sum((each.to_local() if hasattr(each, "to_local") else each).nbytes for each in tensors)


def limit(nbytes):
    now = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])
    resource.setrlimit(resource.RLIMIT_DATA, (now + nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


with strategy.scope():
    small = make(2, 500)
train(small)  # loads modules of torch, whose memory does not count
"""


def limited(strategy: str, program: str, number: int = 4) -> list[Rank]:
    return run_ranks(_LIMITED.format(strategy=strategy) + program, number, timeout_s=150)


def test_a_model_is_held_whole_in_one_host_process_only() -> None:
    program = """
if distnb.replica_id() != 0:
    limit(240_000_000 + 160_000_000)  # three quarters of the parameters; the values kept while the model is made
with strategy.scope():
    model = make(LAYERS, WIDTH)
result = train(model)
"""
    whole = 3 * 20 * 2000 * 2001 * 4
    for rank in limited("ShardedStrategy", program):
        assert rank.check().result <= 1.2 / 4 * whole
    mirrored = limited("MirroredStrategy", program, 2)
    assert mirrored[1].returncode != 0
    assert "allocate memory" in mirrored[1].stderr


@pytest.mark.soak  # test_values_that_nothing_has_set_are_refused makes one there, too
def test_a_model_larger_than_a_process_is_made_on_the_meta_device(tmp_path: Path) -> None:
    """Fill it by its modules' `reset_parameters`, from a file, and from a checkpoint, all shard by shard."""
    program = f"""
from pathlib import Path

folder = Path({str(tmp_path)!r})
limit(300_000_000)
torch.manual_seed(0)


def made():
    with strategy.scope():
        with torch.device("meta"):
            model = make(LAYERS, WIDTH)
        return model


model = made()
spread = [float(model[number].weight.detach().to_local().std()) for number in (0, LAYERS - 1)]
largest = float(model[0].weight.detach().to_local().abs().max())
nbytes = train(model)
distnb.export_safetensors(model, folder / "exported", max_file_nbytes=50_000_000)
path = distnb.Checkpoint(model=model).write(folder / "checkpoint")
weight = model[3].weight.detach().to_local().clone()
del model
gc.collect()  # a sharded model is in reference cycles
limit(300_000_000 + LAYERS * WIDTH * (WIDTH + 1) * 4)  # the mapped files count
loaded = made()
distnb.load_safetensors(loaded, folder / "exported")
equal = [torch.equal(loaded[3].weight.detach().to_local(), weight)]
del loaded
gc.collect()
restored = made()
distnb.Checkpoint(model=restored).restore(path)
equal.append(torch.equal(restored[3].weight.detach().to_local(), weight))
result = spread, largest, nbytes, equal
"""
    whole, bound = 3 * 20 * 2000 * 2001 * 4, 2000**-0.5
    for rank in limited("ShardedStrategy", program):
        spread, largest, nbytes, equal = rank.check().result
        assert all(0.99 * bound / 3**0.5 < each < 1.01 * bound / 3**0.5 for each in spread)
        assert 0.99 * bound < largest <= bound
        assert nbytes <= 1.2 / 4 * whole
        assert equal == [True, True]


def test_values_that_nothing_has_set_are_refused(tmp_path: Path) -> None:
    program = f"""
    import distnb

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scale = torch.nn.Parameter(torch.ones(5, 3)), torch.nn.Parameter(torch.tensor(2.0))
            self.inner, self.norm = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)
            self.register_buffer("mask", torch.ones(3))

        def forward(self, x):
            return self.inner(self.norm(x) * self.mask) @ self.weight.T * self.scale

    strategy = distnb.ShardedStrategy(check_mean_loss=False)
    with strategy.scope():
        with torch.device("meta"):
            model = Own()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        model(torch.arange(12.0).view(4, 3)).sum().backward()
        optimizer.step()

    try:
        strategy.run(step)
    except distnb.errors.ContextError as error:
        result = [str(error)]
    torch.manual_seed(0)
    path = {str(tmp_path / "model")!r}
    plain = Own()
    distnb.Checkpoint(model=plain).write(path)
    distnb.Checkpoint(model=model).restore(path)
    strategy.run(step)
    result += [float(model.scale) != 2.0, model.weight.full_tensor().isfinite().all().item()]
    """
    for rank in run_ranks(program, 2):
        message, *others = rank.check().result
        assert (
            "This Own was made on the meta device, and nothing has set weight, scale, mask. Load values by" in message
        )
        assert others == [True, True]

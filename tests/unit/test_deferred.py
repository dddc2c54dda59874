"""Deferred parameters have the values of an ordinary construction, bit for bit, and take no memory before."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from distnb.runtime.fsdp.deferred import allocate_rest, allocating, deferring, is_deferred, materialise

CPU = torch.device("cpu")


class Initialised(nn.Module):
    """Parameters initialised in the ways that programs use."""

    def __init__(self) -> None:
        super().__init__()
        self.truncated = nn.Parameter(torch.empty(20, 30))
        nn.init.trunc_normal_(self.truncated, std=0.02)
        self.wide, self.tall = nn.Parameter(torch.empty(20, 30)), nn.Parameter(torch.empty(30, 20))
        nn.init.orthogonal_(self.wide)
        nn.init.orthogonal_(self.tall)
        self.scaled = nn.Parameter(torch.randn(40, 5) * 0.02)
        self.zeros, self.ones = nn.Parameter(torch.zeros(40, 5)), nn.Parameter(torch.ones(40, 5))
        self.kaiming, self.xavier = nn.Parameter(torch.empty(3, 4, 5)), nn.Parameter(torch.empty(6, 7))
        nn.init.kaiming_normal_(self.kaiming)
        nn.init.xavier_uniform_(self.xavier)
        self.sparse, self.eye = nn.Parameter(torch.empty(60, 7)), nn.Parameter(torch.empty(6, 7))
        nn.init.sparse_(self.sparse, 0.2)
        nn.init.eye_(self.eye)
        self.dirac = nn.Parameter(torch.empty(6, 7, 3))
        nn.init.dirac_(self.dirac)
        self.copied = nn.Parameter(torch.empty(3, 3))
        source = torch.arange(9.0).view(3, 3)
        with torch.no_grad():
            self.copied.copy_(source)
            source.zero_()
            self.copied[1].mul_(2)
            self.copied.data[0] = 5
            self.copied[:, 2] = self.xavier[:3, 1]
        self.largest = float(self.xavier.detach().abs().max())
        generator = torch.Generator().manual_seed(5)
        self.own = nn.Parameter(torch.empty(4, 4).uniform_(generator=generator))
        positions = torch.zeros(10, 4)
        positions[:, 0::2] = torch.sin(torch.arange(20.0).view(10, 2))
        self.register_buffer("positions", positions)
        self.attribute = torch.zeros(7)
        self.half, self.brain = nn.Linear(8, 8).half(), nn.Linear(4, 4).to(torch.bfloat16)
        self.again, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.weight = self.again.weight
        self.twin = copy.deepcopy(self.again)
        self.dropped = nn.Parameter(torch.rand(5))
        self.apply(self._initialise)
        with torch.no_grad():
            self.dropped += torch.rand(5)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32:
            nn.init.normal_(module.weight, 0, 0.3)


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(10, 4, padding_idx=0),
        nn.LSTM(4, 5, 2),
        nn.MultiheadAttention(8, 2),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm1d(5),
        nn.LayerNorm(4),
        nn.Bilinear(2, 3, 4),
        nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
        nn.utils.parametrizations.orthogonal(nn.Linear(4, 5)),
    )


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=100
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("make", [Initialised, layers, gpt2, llama])
def test_values_are_those_of_an_ordinary_construction(make: Callable[[], nn.Module]) -> None:
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        expected, state = make(), torch.get_rng_state()
        torch.manual_seed(3)
        with deferring(CPU, min_nbytes=1):
            got = make()
            assert torch.equal(torch.get_rng_state(), state)
    parameters = dict(got.named_parameters())
    assert sum(map(is_deferred, parameters.values())) >= len(parameters) - 2
    assert list(parameters) == [name for name, _ in expected.named_parameters()]
    for name, ours in expected.named_parameters():
        theirs = parameters[name]
        assert isinstance(theirs, nn.Parameter)
        assert theirs.requires_grad == ours.requires_grad
        assert torch.equal(materialise(theirs), ours), name
        assert torch.equal(materialise(theirs), ours), f"{name}, again"
    allocate_rest(got)
    for name, buffer in expected.named_buffers():
        assert torch.equal(got.get_buffer(name), buffer)
        assert type(got.get_buffer(name)) is torch.Tensor
    if isinstance(got, Initialised):
        assert isinstance(expected, Initialised)
        assert got.largest == expected.largest
        assert type(got.attribute) is torch.Tensor
        assert got.first.weight is got.again.weight


def test_only_large_tensors_of_modules_are_deferred() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Parameter(torch.empty(100)), nn.Parameter(torch.empty(3))
            self.numbers = torch.empty(100, dtype=torch.int64)
            nn.init.ones_(self.large)
            with torch.no_grad():
                self.small.copy_(self.large[:3])

    with deferring(CPU, min_nbytes=100):
        data = torch.empty(1000)
        holder = Holder()
        with allocating():
            allocated = Holder()
    assert materialise(holder.large).tolist() == [1.0] * 100
    assert not any(map(is_deferred, (data, holder.small, holder.numbers, allocated.large)))
    assert holder.small.tolist() == [1.0, 1.0, 1.0]


def test_a_deferred_tensor_that_is_used_becomes_an_ordinary_one() -> None:
    with torch.random.fork_rng(), deferring(CPU, min_nbytes=1):
        torch.manual_seed(1)
        layer = nn.Linear(3, 2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        expected = nn.Linear(3, 2)
    rows = torch.ones(4, 3)
    assert torch.equal(layer(rows), expected(rows))
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(materialise(layer.weight), 2 * expected.weight)
    assert layer.bias.tolist() == expected.bias.tolist()
    assert repr(layer.bias) == repr(expected.bias.detach())


_LIMITED = """
import ctypes
import resource
import torch
import torch._dynamo  # the functions of torch.nn.init load it
from torch import nn
from distnb.runtime.fsdp.deferred import deferring, materialise

# By default, the C library keeps the memory of freed parameters. See "Memory on the CPU" in docs/sharded.md.
M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000)

torch.set_num_threads(1)


def make():
    return nn.Sequential(*(nn.Linear(1000, 5000) for _ in range(8)))  # 160 MB


def data_nbytes():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])


limit = data_nbytes() + 120_000_000
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    make()
except RuntimeError as error:
    print(error)
with deferring(torch.device("cpu")):
    model = make()
total = 0.0
for parameter in model.parameters():
    total += materialise(parameter).abs().sum().item()
print(total > 0)
"""


def test_a_model_that_does_not_fit_can_be_made() -> None:
    """Limit a process's memory to less than the model needs."""
    ran = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    ordinary, deferred = ran.stdout.splitlines()
    assert "allocate memory" in ordinary
    assert deferred == "True"

"""torch's compiler, which only its use loads, and not the first optimizer of a process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# torch is loaded once, and each use has a process that is forked from that.
FORK = """
import json, os, sys, traceback
import torch

uses, wrong = json.loads(sys.argv[1]), {}
for name, text in uses.items():
    report, to = os.pipe()
    if os.fork() == 0:
        try:
            exec(compile(text, name, "exec"), {})
        except BaseException:
            os.write(to, traceback.format_exc().encode())
        os._exit(0)
    os.close(to)
    wrong[name] = open(report, "rb").read().decode()
print(json.dumps(wrong))
"""
TRAIN = """
import sys
import torch
from distnb.compat.torch_internals import load_compiler_on_demand
load_compiler_on_demand()
load_compiler_on_demand()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())

@torch.compiler.disable
def excluded(x):
    return x + torch.rand(())

def train():
    excluded(model(torch.ones(4, 2))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())

def is_loaded():
    return "torch._dynamo.convert_frame" in sys.modules

train()
assert not is_loaded()
"""

USES = {
    "torch.compile": """
counts = []
def backend(graph, inputs):
    counts.append([node.name for node in graph.graph.nodes if "rand" in node.name])
    return graph.forward
compiled = torch.compile(lambda x: excluded(x * 2) * 3, backend=backend)
compiled(torch.ones(2))
assert counts == [[], []], counts  # two graphs, around the function that is excluded
""",
    "a module of the compiler": """
from torch._dynamo.utils import counters
import torch._dynamo.config as config
from torch._dynamo import convert_frame, utils
assert convert_frame.counters is counters is utils.counters and utils.config is config
assert utils.__spec__.origin == utils.__file__
""",
    "its settings": """
import torch._dynamo.config
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
torch._dynamo.config.suppress_errors = True
from torch._dynamo import config
assert config.suppress_errors
""",
    "its place": """
import importlib.util
assert importlib.util.find_spec("torch._dynamo").origin.endswith("__init__.py") and not is_loaded()
assert importlib.util.find_spec("torch._dynamo.config").name == "torch._dynamo.config"
""",
    "an attribute": "torch._dynamo.reset()",
}


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    """Return the traceback of each use, "" for one without an error."""
    end = "\nassert is_loaded() and sys.modules['torch._dynamo'] is torch._dynamo\ntrain()"
    texts = json.dumps({use: TRAIN + text + end for use, text in USES.items()})
    done = subprocess.run([sys.executable, "-c", FORK, texts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("use", USES)
def test_the_compiler_is_loaded_by_its_first_use_and_not_by_an_optimizer(wrong: dict[str, str], use: str) -> None:
    assert wrong[use] == ""

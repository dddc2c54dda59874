"""A replica that dies, raises or differs in the middle of a step of a sharded model ends the step on all."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

_ENDS_WITHIN_S = 4.0  # about a second, on a machine that does other work

_TRAINING = """%%distribute sharded3
import os, signal, time
with strategy.scope():
    model = torch.nn.Sequential(*(torch.nn.Linear(60 + number, 61 + number) for number in range(4)))
steps = 0

def fail():
    if distnb.replica_id() == 1 and steps == 3:
        print("now", time.time(), flush=True)
        time.sleep(0.3)
        {failure}

def in_backward(gradient):
    {backward}

def step():
    hidden = model[1](model[0](torch.ones(4, 60)))
    {forward}
    hidden.register_hook(in_backward)
    model[3](model[2](hidden)).sum().backward()

while True:
    strategy.run(step)
    steps += 1
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook(3) as notebook:
        notebook.run("import torch\nimport distnb\nsharded3 = distnb.ShardedStrategy(min_size=0)")
        yield notebook


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize(
    ("failure", "error"),
    [
        ("raise ValueError('on purpose')", "ValueError: on purpose"),
        ("model[0](torch.ones(4, 60))", r"CollectiveMismatchError: .*all_gather_shards\(float32"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "EngineDied: "),
    ],
)
def test_a_failure_in_the_middle_of_a_step_ends_it(notebook: Notebook, place: str, failure: str, error: str) -> None:
    places = {"forward": "pass", "backward": "pass"} | {place: "fail()"}
    ran = notebook.try_run(_TRAINING.format(failure=failure, **places))
    ended = time.time()
    assert re.match(error, f"{ran.error_name}: {ran.error_text}", re.DOTALL), ran
    [began] = re.findall(r"now ([\d.]+)", ran.stdout)
    assert ended - float(began) < _ENDS_WITHIN_S + 0.3
    notebook.run("%distnb restart --missing")
    trained = notebook.run(_TRAINING.format(failure="pass", **places).replace("while True", "while steps < 5"))
    assert "now" in trained.stdout

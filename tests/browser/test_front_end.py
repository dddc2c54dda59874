"""The front end in JupyterLab: its display while a cell runs, and the saved output.

Events are replayed; the last test has real engines.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.browser.lab import OpenNotebook, Server
from tests.support.kernel import lines_of_each

pytestmark = [pytest.mark.processes, pytest.mark.browser, pytest.mark.timeout(240)]

SETUP = "%load_ext distnb\nfrom tests.browser import replay\nsession = replay.install(2)"


def data_of(notebook: dict[str, Any], index: int) -> list[dict[str, Any]]:
    return [output["data"] for output in notebook["cells"][index]["outputs"] if "data" in output]


def text_of(notebook: dict[str, Any], index: int, stream: str = "stdout") -> str:
    return "".join(
        "".join(output["text"])
        for output in notebook["cells"][index]["outputs"]
        if output["output_type"] == "stream" and output["name"] == stream
    )


def test_curves_grow_and_remain_after_the_cell(chrome: Any, lab: Server) -> None:
    lab.write("live.ipynb", [SETUP, "%%distribute mirrored\n# replay: train 4"])
    with OpenNotebook(chrome, lab, "live.ipynb") as notebook:
        notebook.run(0)
        view = notebook.output(1).locator(".distnb-live")
        curve = view.locator("svg[data-name='loss'] path.line")
        with notebook.held():
            notebook.start(1)
            curve.wait_for(timeout=60_000)
            for _ in range(3):
                length = len(curve.get_attribute("d"))
                notebook.see(lambda length=length: len(curve.get_attribute("d")) > length)  # type: ignore[misc]
            # Reduced values give one thick line, differing ones a thin line each.
            notebook.see(lambda: view.locator("svg[data-name='local loss'] path.line").count() == 2)
            assert curve.count() == 1
            assert "running" in view.locator(".head").inner_text()
            notebook.see(lambda: view.locator("table tr").count() == 3)
            notebook.see(lambda: "examples/s" in view.locator("table").inner_text())
            notebook.see(lambda: "epoch 1" in notebook.output(1).inner_text())
            labels_are_apart_and_inside(notebook, view)
            values_are_read_and_controls_work(notebook, view)
            assert not is_light(colour_of(view))
            notebook.command("apputils:change-theme", {"theme": "JupyterLab Dark"})
            notebook.see(lambda: is_light(colour_of(view)))

        notebook.wait(1)
        notebook.see(lambda: view.locator("svg").count() == 0)
        assert notebook.picture(1) > 100
        saved = notebook.saved()
        assert "[0-1] epoch 1" in text_of(saved, 1)
        (data,) = data_of(saved, 1)
        assert "widget-view" not in str(data)
        assert "loss: " in "".join(data["text/plain"])
        html = lab.notebooks / "live.html"
        command = [sys.executable, "-m", "nbconvert", "--to", "html", str(notebook.path), "--output", str(html)]
        subprocess.run(command, check=True, timeout=60, capture_output=True)
        assert "data:image/svg+xml;base64," in html.read_text()

    with OpenNotebook(chrome, lab, "live.ipynb") as again:  # reopened: not run, and untrusted
        assert again.picture(1) > 100
        badge = again.page.locator(".jp-Notebook .jp-Cell").nth(1).locator(".distnb-mark")
        again.see(lambda: badge.inner_text() == "mirrored · ended")
        pictures = again.output(1).locator("img[alt^='loss'], img[alt^='local loss']")
        assert (
            pictures.evaluate_all("all => all.map(each => each.offsetTop)")
            == [pictures.first.evaluate("each => each.offsetTop")] * 2
        ), "side by side"


def labels_are_apart_and_inside(notebook: OpenNotebook, view: Any) -> None:
    chart = view.locator("svg[data-name='loss']")
    notebook.see(lambda: "3" in chart.locator("text").all_text_contents())  # the second of the epochs' labels
    rows = chart.evaluate(
        """svg => {
            const edges = {};
            for (const text of svg.querySelectorAll("text:not([text-anchor])")) {
                const { left, right } = text.getBoundingClientRect();
                (edges[text.getAttribute("y")] ??= []).push(left, right);
            }
            const { left, right } = svg.getBoundingClientRect();
            return Object.values(edges).map(row => [left, ...row, right]);
        }"""
    )
    assert len(rows) == 2
    assert all(row == sorted(row) for row in rows)


def values_are_read_and_controls_work(notebook: OpenNotebook, view: Any) -> None:
    chart = view.locator("figure").filter(has=notebook.page.locator("svg[data-name='local loss']"))
    svg, tip = chart.locator("svg"), chart.locator(".tip")
    notebook.see(lambda: chart.locator("path.epoch").count() > 0)
    assert "local loss: last" in svg.get_attribute("aria-label")
    svg.hover(position={"x": 150, "y": 60})
    notebook.see(lambda: all(text in tip.inner_text() for text in ("step", "[0]", "[1]")))
    svg.focus()
    notebook.page.keyboard.press("Home")
    notebook.see(lambda: tip.inner_text().startswith("step 1 · epoch 1"))
    notebook.page.keyboard.press("ArrowRight")
    notebook.see(lambda: tip.inner_text().startswith("step 2 · epoch 1"))
    notebook.page.keyboard.press("Escape")
    notebook.see(lambda: not tip.is_visible())
    view.get_by_label("smoothing").fill("0.9")  # while the kernel is busy
    notebook.see(lambda: chart.locator("path.raw").count() == 2)
    assert chart.locator("path.line").count() == 2
    view.get_by_label("smoothing").fill("0")
    view.get_by_label("log scale").check()
    notebook.see(lambda: "0.1" in chart.locator("svg text").all_text_contents())
    view.get_by_label("log scale").uncheck()


def colour_of(view: Any) -> str:
    return str(view.evaluate("view => getComputedStyle(view).color"))


def is_light(color: str) -> bool:
    return int(color.removeprefix("rgb(").removeprefix("rgba(").split(",")[0]) > 128


def test_progress_bars_figures_errors_and_floods_are_displayed(chrome: Any, lab: Server) -> None:
    replayed = ("progress 2", "figures", "train 0.5 1", "flood 2")
    cells = [SETUP, *(f"%%distribute mirrored\n# replay: {what}" for what in replayed), "6 * 7"]
    lab.write("output.ipynb", cells)
    with OpenNotebook(chrome, lab, "output.ipynb") as notebook:
        notebook.run(0)
        notebook.start(1)
        notebook.page.wait_for_function("() => document.body.innerText.includes('[1it/s]')", timeout=60_000)
        notebook.see(lambda: one_line_per_replica(notebook.output(1).inner_text()))
        notebook.see(lambda: notebook.output(1).locator(".distnb-live .head").is_visible())
        assert not notebook.output(1).locator(".controls").is_visible(), "there is no chart to control"
        notebook.wait(1)
        notebook.see(lambda: "100/100" in notebook.output(1).inner_text())
        notebook.run(2)
        notebook.see(lambda: notebook.output(2).locator(".distnb-replicas img").count() == 2)
        notebook.run(3)
        for text in ("ValueError: wrong shape", "failed"):
            notebook.output(3).filter(has_text=text).wait_for(timeout=60_000)
        assert "distnb/magics" not in notebook.output(3).inner_text()
        notebook.run(4)
        notebook.output(4).filter(has_text="the end").wait_for(timeout=60_000)
        text = notebook.output(4).inner_text()
        assert "left out" in text
        assert text.count("\n") < 3_000
        notebook.run(5)
        notebook.see(lambda: "42" in notebook.output(5).inner_text())


def one_line_per_replica(shown: str) -> bool:
    return "[0]" in shown and "[1]" in shown and shown.count("|") == 4


# -- with real engines: the main job ------------------------------------------------------------------------------------

DEFINE = """
import distnb, torch
torch.manual_seed(0)
LR = 0.05
data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randint(0, 3, (256,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
def make_model():
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
"""
TRAIN = """%%distribute mirrored
import itertools, os, time
from torch.nn import functional as F
with strategy.scope():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

def train_step(batch):
    x, y = batch
    loss = distnb.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"), global_batch_size=16)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(0.02)
    return loss

def held():  # the page may be slower than the cell
    seen = strategy.run(lambda: torch.tensor(float(os.path.exists(HELD))))
    return strategy.reduce("sum", seen, axis=None) > 0

for epoch in itertools.count():
    for batch in strategy.distribute_dataset(loader):
        losses = strategy.run(train_step, args=(batch,))
        distnb.live(loss=strategy.reduce("sum", losses, axis=None), own=losses)
    print("epoch", epoch)
    if epoch >= 2 and not held():
        break
"""
WIDGETS = """%%distribute mirrored
import ipywidgets
from tqdm.notebook import tqdm
me, out = distnb.replica_id(), ipywidgets.Output()
display(ipywidgets.HBox([ipywidgets.HTML(f"<b>bold {me}</b>"), ipywidgets.Button(description="press"), out]))
with out:
    print("captured", me)
for _ in tqdm(range(3), desc=f"bar {me}"):
    pass
"""


def test_a_mirrored_cell_shows_its_training_live(chrome: Any, lab: Server) -> None:
    lab.write(
        "train.ipynb",
        [
            "%load_ext distnb\n%distnb start -n 2",
            f"HELD = {str(lab.held)!r}" + DEFINE,
            TRAIN,
            "losses",
            WIDGETS,
            "%distnb stop",
        ],
    )
    with OpenNotebook(chrome, lab, "train.ipynb") as notebook:
        notebook.run(0, 90)
        notebook.see(lambda: "2 engines ready" in notebook.output(0).inner_text())
        notebook.run(1, 60)
        output = notebook.output(2)
        view = output.locator(".distnb-live")
        with notebook.held():
            notebook.start(2)
            view.locator("svg[data-name='loss'] path.line").wait_for(timeout=60_000)
            notebook.see(lambda: view.locator("svg[data-name='own'] path.line").count() == 2)
            words = ("replica", "device", "step", "examples/s", "memory", "cpu:0", "cpu:1")
            notebook.see(lambda: all(word in view.locator("table").inner_text() for word in words))
        notebook.wait(2, 90)
        # Two charts, and the picture of the time.
        notebook.see(lambda: output.locator("img[src^='data:image/svg+xml']").count() == 3)
        output.filter(has_text="ended").wait_for(timeout=60_000)
        notebook.see(lambda: same_last_epoch(lines_of_each(output.inner_text())))
        notebook.run(3)
        notebook.see(lambda: "replica" in notebook.output(3).inner_text().lower())
        notebook.run(4)
        notebook.see(lambda: shows_widgets(notebook.output(4)))
        notebook.saved()
        notebook.reload()
        notebook.see(lambda: shows_widgets(notebook.output(4)))  # the kernel provides their states
        notebook._wait_for_kernel()
        notebook.run(5)


def shows_widgets(output: Any) -> bool:
    shown = output.inner_text().replace("\u2007", " ")
    texts = [f"{what} {replica}" for what in ("bold", "captured", "bar") for replica in (0, 1)]
    return (
        all(text in shown for text in texts)
        and output.locator("button[disabled]", has_text="press").count() == 2
        and output.locator(".progress-bar-success").count() == 2
    )


def same_last_epoch(lines: list[list[str]]) -> bool:
    first, second = (each[-1] if each else "" for each in lines)
    return first == second and int(first.removeprefix("epoch ") or 0) >= 2

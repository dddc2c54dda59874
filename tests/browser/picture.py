"""Takes the README's picture: a real cell, running in JupyterLab. `python -m tests.browser.picture docs/running.png`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser.lab import FLAGS, ROOT, OpenNotebook, Server, chromium

TRAINS = """%%distribute mirrored
with strategy.scope():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

def train_step(batch):
    x, y = batch
    loss = distnb.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

train_batches = strategy.distribute_dataset(train_loader)
for epoch in range(100):
    for batch in train_batches:
        losses = strategy.run(train_step, args=(batch,))
        loss = strategy.reduce("sum", losses, axis=None)
        distnb.live(loss=loss, own_part=losses)
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
"""


_HEIGHT = 800.0


def cells_to_run() -> list[str]:
    """The quick start's cells up to the one that trains, and a shorter one in its place, which tells of each replica."""
    notebook = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    trains = next(i for i, cell in enumerate(cells) if cell.startswith("%%distribute"))
    return [*cells[:trains], TRAINS.strip()]


def take(path: Path) -> None:
    """Run the cells, and keep what the last one shows while it runs."""
    cells = cells_to_run()
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        server = Server(Path(home))
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            server.write("quickstart.ipynb", cells)
            with OpenNotebook(browser, server, "quickstart.ipynb") as notebook:
                notebook.page.set_viewport_size({"width": 900, "height": 1500})
                notebook.command("application:toggle-left-area")
                for index in range(len(cells) - 1):
                    notebook.run(index, 120)
                notebook.start(len(cells) - 1)
                output = notebook.output(len(cells) - 1)
                notebook.see(lambda: "epoch 4:" in output.inner_text())
                notebook.page.screenshot(path=path, clip=_around(notebook, len(cells) - 1))
                Image.open(path).convert("RGB").quantize(96).save(path, optimize=True)
                notebook.press_stop()
                notebook.wait(len(cells) - 1)
        finally:
            browser.close()
            server.close()


def _around(notebook: OpenNotebook, index: int) -> dict[str, float]:
    cell = notebook.page.locator(".jp-Notebook .jp-Cell").nth(index)
    cell.scroll_into_view_if_needed()
    box = cell.bounding_box()
    assert box is not None
    return {"x": box["x"], "y": max(0.0, box["y"]), "width": box["width"], "height": min(box["height"], _HEIGHT)}


if __name__ == "__main__":
    take(Path(sys.argv[1]))

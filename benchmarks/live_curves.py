"""The cost of drawing: 10,000 steps of 16 replicas, received as in a training, and drawn by the widget in a real page.

    python -m benchmarks.live_curves [--seconds 20] [--replicas 16] [--steps 10000]

A kernel replays the messages of replicas in the place of engines. The page is JupyterLab in a headless Chromium. It
measures the drawings per second in the page; the live view's processor time in the kernel, with all work of its thread;
and that of the page's main thread, including JupyterLab's own part; each as a share of one core.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from benchmarks.guard import TARGETS
from benchmarks.harness import Comparison, options, report
from tests.browser.lab import FLAGS, OpenNotebook, Server, chromium

SETUP = """
%load_ext distnb
import math, threading, time
from distnb.topology import Device, Team
from distnb.widgets.cell_view import CellView
from distnb.widgets.front import Front
from distnb.wire.messages import Live, Status
from tests.browser import replay
session = replay.install({replicas})
spent = [0.0, 0]

def timed(method):
    def call(*args):
        begin = time.thread_time()
        try:
            return method(*args)
        finally:
            spent[0] += time.thread_time() - begin
    return call

Front._drain = timed(Front._drain)
CellView.tick = timed(CellView.tick)

def curves(self, steps, seconds):
    begin, turn, done = time.monotonic(), 0, [0] * self.replicas
    while min(done) < steps:
        time.sleep(0.05)
        now = min(int(steps), int((time.monotonic() - begin) / seconds * steps))
        turn += 1
        for replica in range(turn % 4, self.replicas, 4):  # each five times a second, as engines do
            points = []
            for step in range(done[replica] + 1, now + 1):
                own = math.exp(-step / steps) + 0.05 * math.sin(step * (1 + replica / 7))
                points.append((step, 0, {{"own loss": own}}))
            done[replica] = now
            yield Live(engine=replica, program=self.program, replica=replica, points=tuple(points))

replay.Player.curves = curves
"""
WATCH = """() => {
    window.drawings = 0;
    document.querySelector(".distnb-live figure:has(canvas)").plot.hooks.draw.push(() => window.drawings++);
}"""


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(__doc__, seconds=20, replicas=16, steps=10_000)
    cell = f"%%distribute mirrored\n# replay: curves {given.steps} {given.seconds}"
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        server = Server(Path(home))
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            server.write("curves.ipynb", [SETUP.format(replicas=given.replicas), cell, "print(spent[0])"])
            with OpenNotebook(browser, server, "curves.ipynb") as notebook:
                notebook.run(0)
                notebook.start(1)
                notebook.output(1).locator("figure canvas").first.wait_for(timeout=60_000)
                page = notebook.page.context.new_cdp_session(notebook.page)
                page.send("Performance.enable", {"timeDomain": "threadTicks"})

                def page_s() -> float:
                    found = page.send("Performance.getMetrics")["metrics"]
                    return float(next(each["value"] for each in found if each["name"] == "TaskDuration"))

                notebook.page.evaluate(WATCH)
                before, seconds = page_s(), 0.6 * given.seconds
                notebook.page.wait_for_timeout(1000 * seconds)
                in_page, drawings = page_s() - before, notebook.page.evaluate("window.drawings")
                notebook.wait(1)
                notebook.run(2)
                notebook.see(lambda: notebook.output(2).inner_text().strip() != "")
                in_kernel = float(notebook.output(2).inner_text())
        finally:
            browser.close()
            server.close()
    title = f"{given.steps:,} steps of {given.replicas} replicas in {given.seconds} s"
    rate = Comparison({"drawings": (drawings / seconds,), "a second": (1.0,)})
    met = report(title, rate, baseline="a second", unit="", scale=1.0, targets=TARGETS["live_curves"]["rate"])
    shares = Comparison({"kernel": (in_kernel / given.seconds,), "page": (in_page / seconds,), "a core": (1.0,)})
    targets = TARGETS["live_curves"]["share"]
    met &= report(f"{title}, seconds of a core", shares, baseline="a core", unit="s", scale=1.0, targets=targets)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""The code in the README and the documentation, run in a notebook from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.kernel import Notebook, lines_of_each

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
# The script of machines.md runs on several machines: see test_multi_worker.py.
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted(ROOT.glob("docs/*.md")) if page.name != "machines.md")]
BLOCKS = {
    page: re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for page in PAGES
}
# The quick start is long enough to be watched.
BLOCKS["README.md"] = [block.replace("EPOCHS = 15 ", "EPOCHS = 1 ") for block in BLOCKS["README.md"]]


SERVERS = "docs/parameter_servers.md"  # it starts a cluster of its own


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks and page != SERVERS])
def test_code_on_a_page_gives_the_shown_output(notebook: Notebook, page: str) -> None:
    show(notebook, page)


def test_code_on_the_page_of_parameter_servers_gives_the_shown_output() -> None:
    with Notebook(env={"OMP_NUM_THREADS": "1"}) as notebook:
        show(notebook, SERVERS)
        # Jupyter kills a kernel that ends slowly, which would leave the folder and the cluster's files.
        notebook.run("temporary.cleanup()\ndistnb.stop()")


def show(notebook: Notebook, page: str) -> None:
    for block in BLOCKS[page]:
        if "%distnb start" not in block or page == SERVERS:  # a cluster runs already
            ran = notebook.run(block)
            said = re.findall(r"print\(.*\)  # (.*)", block)
            for words in [
                word for text in said for word in re.split("[,;] (?:then )?(?![^(]*\\))", text) if len(said) == 1
            ]:
                assert words in ran.stdout + str(lines_of_each(ran.stdout))

"""The documentation site builds without warnings, its links work, and it loads nothing from other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import distnb
from tests.browser.lab import FLAGS, chromium

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
_FETCHED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


class Page(HTMLParser):
    """The anchors, links and fetched files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.ids, self.links, self.fetched = path, {""}, set[str](), set[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if given.get(_FETCHED.get(tag, "")):
            self.fetched.add(given[_FETCHED[tag]])

    def local(self) -> Iterator[tuple[str, Path, str]]:
        """Yield links and files of this site: as written, the file, and the anchor in it."""
        for link in self.links | self.fetched:
            parts = urlsplit(link)
            if not parts.scheme and not parts.netloc:
                there = (self.path.parent / unquote(parts.path)).resolve() if parts.path else self.path
                yield link, there, unquote(parts.fragment)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    folder = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, "-m", "sphinx", "-E", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs", "."]
    built = subprocess.run([*command, folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return {path: Page(path) for path in folder.rglob("*.html") if "_static" not in path.parts}


def test_every_link_leads_somewhere(site: dict[Path, Page]) -> None:
    broken = [
        f"{page.path.name}: {link}"
        for page in site.values()
        for link, there, anchor in page.local()
        if not there.exists() or (anchor and there in site and anchor not in site[there].ids)
    ]
    assert not broken


def test_pages_load_nothing_from_other_hosts(site: dict[Path, Page]) -> None:
    fetched = {urlsplit(each) for page in site.values() for each in page.fetched}
    assert {each.geturl() for each in fetched if each.netloc} == set()
    folder = next(path for path in site if path.name == "search.html").parent
    styles = [path.read_text(encoding="utf-8") for path in folder.rglob("*.css")]
    assert styles
    assert not [
        found for style in styles for found in re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)]*", style)
    ]


def test_all_pages_and_notebooks_are_built(site: dict[Path, Page]) -> None:
    folder = next(path for path in site if path.name == "search.html").parent
    sources = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/reference/*.rst"), *ROOT.glob("notebooks/**/*.ipynb")]
    first = {there for _, there, _ in site[folder / "docs" / "index.html"].local()}
    for source in sources:
        page = folder / source.relative_to(ROOT).with_suffix(".html")
        assert page in first  # its list of all pages
    quickstart = site[folder / "notebooks" / "quickstart.html"]
    assert any(each.startswith("data:image/") for each in quickstart.fetched)  # it was saved with pictures


def test_solutions_are_folded(site: dict[Path, Page]) -> None:
    folder = next(path for path in site if path.name == "search.html").parent
    for exercise in ROOT.glob("notebooks/exercises/*.ipynb"):
        html = (folder / exercise.relative_to(ROOT).with_suffix(".html")).read_text(encoding="utf-8")
        folded = re.findall(r"<details><summary>Solution</summary>(.*?)</details>", html, flags=re.DOTALL)
        assert folded
        assert all('<div class="highlight' in each for each in folded)
        assert "<strong>Solution" not in html


def test_every_public_name_is_in_the_reference(site: dict[Path, Page]) -> None:
    ids = {each for path, page in site.items() if path.parent.name == "reference" for each in page.ids}
    names = {*distnb.__all__} - {"experimental", "__version__"}  # aliases
    # A name that is missing belongs on the page of docs/reference that it fits.
    assert {name for name in names if f"distnb.{name}" not in ids and f"module-distnb.{name}" not in ids} == set()


def test_names_in_tables_are_complete(site: dict[Path, Page]) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on this machine (Debian and Ubuntu: apt install chromium)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page(viewport={"width": 1250, "height": 900})
        seen, broken = 0, {}
        for each in (path for path in site if path.stem in ("strategies", "commands", "from_tf_distribute")):
            page.goto(each.as_uri(), wait_until="domcontentloaded")
            words = page.locator("td code .pre")
            seen += words.count()
            parted = words.evaluate_all(
                "all => all.filter(each => each.getClientRects().length > 1).map(e => e.textContent)"
            )
            if parted:
                broken[each.name] = parted
        browser.close()
    assert seen > 100
    assert broken == {}

"""The configuration of the documentation site, which `make docs` builds from docs/ and notebooks/.

The repository's root is Sphinx's source folder, so the relative links of a page lead to the same places on the site
and on a code host. Any warning is an error. Notebooks are shown as they were saved: `make test` runs each and compares
its outputs.
"""

from __future__ import annotations

import json
import os
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import distnb

os.environ["KERAS_BACKEND"] = "torch"  # read when distnb.keras is loaded, for its reference

project, version, release = "distnb", distnb.__version__, distnb.__version__
root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/**"]
exclude_patterns = [".*", "build", "dist", "extension", "tests", "benchmarks", "distnb", "**/.ipynb_checkpoints"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # widgets need a kernel; what stays of them is a picture
myst_heading_anchors = 3
myst_enable_extensions = ["html_image"]  # pages give some pictures a width

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 90
default_role = "py:obj"  # docstrings write `name`: a link where there is such a name, else code
napoleon_custom_sections = ["Returns", "Yields"]  # as text: types are in the signature, and a colon is a colon
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "distnb"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_extra_path = ["site/index.html"]  # at the site's root; it leads to the first page
html_copy_source = False
html_show_copyright = False


def take_in_new_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace "(others)" on the first page by all pages that its lists do not name, so a new page needs no entry."""
    if page == root_doc:
        named = {f"docs/{line.strip()}" for line in source[0].splitlines()} | {root_doc}
        pages = sorted(name for name in app.env.found_docs if name.count("/") == 1 and name.startswith("docs/"))
        source[0] = source[0].replace("(others)", "\n".join(name[5:] for name in pages if name not in named))


def fold_solutions(app: Sphinx, page: str, source: list[str]) -> None:
    """Fold an exercise's solution, a text cell and a code cell, into one cell that opens with a click."""
    if not page.startswith("notebooks/exercises/"):
        return
    notebook = json.loads(source[0])
    folded: list[dict[str, Any]] = []
    for cell in notebook["cells"]:
        solution, code = "solution" in cell["metadata"].get("tags", ()), cell["cell_type"] == "code"
        if solution and code:
            text = folded.pop()
            why = "".join(text["source"]).removeprefix("**Solution.**").strip()
            what = f"```python\n{''.join(cell['source'])}\n```"
            text["source"] = f"<details><summary>Solution</summary>\n\n{why}\n\n{what}\n\n</details>"
            cell = text
        folded.append(cell)
    notebook["cells"] = folded
    source[0] = json.dumps(notebook)


def read_as_ipython(app: Sphinx, page: str, source: list[str]) -> None:
    """Have lines such as `!pip install …` coloured, too. Jupyter does not store the notebooks' lexer."""
    if page.startswith("notebooks/"):
        notebook = json.loads(source[0])
        notebook["metadata"]["language_info"]["pygments_lexer"] = "ipython3"
        source[0] = json.dumps(notebook)


def keep_first_sentence(app: Sphinx, kind: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Keep napoleon from reading the text before a colon in an attribute's first line as its type."""
    if kind in ("attribute", "property", "data") and lines:
        lines[:1] = lines[0].split(" ", 1)


_PUBLIC = {where.rpartition(":")[2] if ":" in where else name: name for name, where in distnb._WHERE.items()}
"""An object's name in the module that defines it, and its public name."""


def find_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Element
) -> nodes.Element | None:
    """Resolve a reference to the place of definition to the entry of the public name."""
    name = _PUBLIC.get(str(node.get("reftarget", "")).rpartition(".")[2])
    if node.get("refdomain") != "py" or name is None:
        return None
    domain: Any = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", f"distnb.{name}", node, shown)


def setup(app: Sphinx) -> None:
    """Connect the handlers to the events of Sphinx."""
    app.connect("source-read", take_in_new_pages)
    app.connect("source-read", fold_solutions)
    app.connect("source-read", read_as_ipython)
    app.connect("autodoc-process-docstring", keep_first_sentence, priority=400)  # before napoleon
    app.connect("missing-reference", find_public_name)

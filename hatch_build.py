"""The package's description on PyPI: README.md, adapted because its relative links do not work there.

If `[project.urls]` in pyproject.toml names the repository as `Source`, the links lead to it. Otherwise they become
plain text, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+://|#)([^)]+)\)")
_PICTURE = re.compile(r'<img src="(?!\w+://)([^"]+)"[^>]*>\n*')


class ReadmeHook(MetadataHookInterface):
    """A metadata hook that sets the package's description."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": described(text, source)}


def described(readme: str, source: str | None) -> str:
    """Return the README for a place outside its repository, which is at the URL `source` (None if unpublished)."""
    if source is None:
        return _LINK.sub(r"\1", _PICTURE.sub("", readme))
    files, raw = f"{source.rstrip('/')}/blob/HEAD", f"{source.rstrip('/')}/raw/HEAD"
    readme = _PICTURE.sub(lambda found: found[0].replace(f'"{found[1]}"', f'"{raw}/{found[1]}"', 1), readme)
    return _LINK.sub(rf"[\1]({files}/\2)", readme)

"""Make the package's description from README.md, with links that lead somewhere outside a clone."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)\s]+)\)")


def absolute_links(text: str, repository: str) -> str:
    """The Markdown ``text`` with each relative link as one into ``repository``.

    Args:
        text: A document at the root of the repository.
        repository: URL of the repository, from ``[project.urls]``.
    """

    def absolute(link: re.Match[str]) -> str:
        view = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({repository}/{view}/HEAD/{link['path']})"

    return _LINK.sub(absolute, text)


class ReadmeHook(MetadataHookInterface):
    """Gives the project a readme whose links are absolute."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the readme to the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute_links(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

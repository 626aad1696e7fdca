"""Placement of a mirror: not among the objects of another chain."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from deltachain.chain.identity import chain_around
from deltachain.errors import ConfigError
from deltachain.store import Store


def check_placement(source: Store, destination: Store) -> None:
    """Check that a mirror would not lie inside its source, nor in the folder of another chain.

    Raises:
        ConfigError: It would.
    """
    outer, inner = source.url.rstrip("/"), destination.url
    if inner.startswith("file://"):
        folder = Path(url2pathname(urlsplit(inner).path)).resolve()
        around = chain_around(folder.parent)
        found = str(around) if around else ""
    else:
        found = outer if inner.startswith(f"{outer}/") else ""
    if found:
        raise ConfigError(
            f"{inner} is inside {found}, where a chain is stored",
            hint="only its publisher may write there: name a folder or a prefix beside the chain",
        )

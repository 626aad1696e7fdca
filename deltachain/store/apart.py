"""Whether two URLs name places apart from one another, as rights to write are given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from deltachain.errors import ConfigError
from deltachain.redact import redacted_url

_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>[^?#]*)", re.DOTALL)

_WHOLE: Final = {"hf": 3}  # rights to a Hub bucket hold for all of it


def check_apart(url: str, chain: str) -> None:
    """Check that whoever may write at one URL need not have the right to write to a chain."""
    here, there = _place(url), _place(chain)
    shorter = min(len(here), len(there))
    if here[:shorter] != there[:shorter]:
        return
    if here == there:
        relation = "is in the bucket of" if here[0] in _WHOLE else "is the URL of"
    else:
        relation = "is inside" if len(here) > len(there) else "contains"
    raise ConfigError(
        f"{redacted_url(url)} {relation} the chain {redacted_url(chain)}, which only its publisher "
        "may write to",
        hint="name a place beside the chain; on the Hub, a bucket of its own",
    )


def _place(url: str) -> tuple[str, ...]:
    match = _URL.match(url)
    scheme = match["scheme"].lower() if match else "file"
    if scheme == "file":
        path = unquote(f"/{match['rest']}") if match else url
        return scheme, *Path(path).resolve().parts[1:]
    rest = match["rest"] if match else ""
    parts = tuple(part for part in rest.split("/") if part not in ("", "."))
    if scheme in _WHOLE:  # whose names are the same in any case
        parts = tuple(part.lower() for part in parts[: _WHOLE[scheme]])
    return scheme, *parts

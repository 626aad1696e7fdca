"""What messages, logs and pages may show of URLs and paths that users give: nothing secret."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final
from urllib.parse import unquote

_PLACES: Final = frozenset({"abfs", "abfss", "az", "hdfs", "sftp", "smb", "ssh"})
"""Schemes with a container or a user name before an ``@`` in the URL, neither of them secret."""

_REVISIONS: Final = frozenset({"hf", "s3"})  # schemes in whose paths an @ is nothing special
_HOSTS: Final = frozenset({"http", "https", "dns"})  # of replicas: a host and a port follow

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.%]*\]|[^:%]*)(:[0-9]*)?")

HIDDEN: Final = "..."  # shown for what may be a secret

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")


def redacted_url(url: str) -> str:
    """Return a URL without user, password, query and fragment; a path is returned as it is.

    Of a URL whose parts cannot be told apart, only the scheme is shown.
    """
    match = _SCHEME.match(url)
    if match is None:
        has_host = url.startswith("//") and "@" in url.split("/")[2]  # a URL without its scheme
        is_path = not has_host and (url.startswith(("/", ".", "~")) or "@" not in url)
        return url if is_path else f"{HIDDEN}@{url.rpartition('@')[2]}"
    scheme, rest = match[1].lower(), url[match.end() :]
    if scheme == "file":
        return url
    shown = re.split(r"[?#;&]" if scheme in _HOSTS else r"[?#]", rest, maxsplit=1)[0]
    authority, slash, path = shown.partition("/")
    who, at, host = authority.rpartition("@")
    is_odd = "@" in rest[len(authority) :] and scheme not in _REVISIONS
    if is_odd or (scheme in _HOSTS and not _HOST.fullmatch(host)):
        return f"{match[0]}{HIDDEN}"
    if at and scheme in _PLACES:
        host = f"{who.partition(':')[0]}@{host}"
    return f"{match[0]}{host}{slash}{path}"


_IN_TEXT: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+[^\s'\"<>|`]*[^\s'\"<>|`.,:;)\]}]")
_NAMES: Final = re.compile(r"(?<=[?&])[\w.-]+=")
_BETWEEN: Final = re.compile(r"[/:@?#&]")

LONGEST: Final = 300  # longest text from a store or a replica that is shown, in characters
SHORTEST: Final = 4  # characters of the shortest part that is hidden wherever it stands


def redacted_text(text: str, secrets: Collection[str] = ()) -> str:
    if ":/" in text:
        text = _IN_TEXT.sub(lambda found: _shown(found[0]), text)
    if secrets:
        longest_first = sorted(secrets, key=len, reverse=True)
        either = "|".join(map(re.escape, longest_first))
        text = re.sub(rf"((?<!\w)|(?<=%[0-9A-F]{{2}}))({either})(?!\w)", HIDDEN, text)
    return text


def _shown(url: str) -> str:
    return redacted_url(url) if any(mark in url for mark in "@?=") else url


def hidden_parts(texts: Iterable[str]) -> set[str]:
    """Return the parts that :func:`redacted_url` leaves out, which libraries may name alone."""
    parts: set[str] = set()
    for text in texts:
        shown = set(_BETWEEN.split(redacted_text(redacted_url(text))))
        parts |= set(_BETWEEN.split(_NAMES.sub("", text))) - shown
    return {one for part in parts for one in (part, unquote(part)) if len(one) >= SHORTEST}


def printable(text: str) -> str:
    """Return a text of others on one line: without control characters, cut to ``LONGEST``."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:LONGEST])
    return f"{clean}…" if len(text) > LONGEST else clean


def redacted_path(path: Path) -> str:
    """Return a path that leads somewhere; otherwise it may be a secret in the wrong variable."""
    try:
        is_path = path.exists() or (len(path.parts) > 1 and path.parent.is_dir())
    except (OSError, ValueError):
        is_path = False
    return str(path) if is_path else HIDDEN

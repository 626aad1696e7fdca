"""What messages, logs and pages may show of URLs and paths that users give: nothing secret."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_PLACES: Final = frozenset({"abfs", "abfss", "az", "hdfs", "sftp", "smb", "ssh"})
"""Schemes with a container or a user name before an ``@`` in the URL, neither of them secret."""

_REVISIONS: Final = frozenset({"hf", "s3"})
"""Schemes in whose paths an ``@`` is nothing special."""

_HOSTS: Final = frozenset({"http", "https", "dns"})
"""Schemes of replicas, after which there are a host and a port."""

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.%]*\]|[^:]*)(:[0-9]*)?")

HIDDEN: Final = "..."
"""Shown for what may be a secret."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")


def redacted_url(url: str) -> str:
    """Return a URL without user, password, query and fragment; a path is returned as it is.

    Of a URL whose parts cannot be told apart, such as one with a slash in its password, only the
    scheme is shown.
    """
    match = _SCHEME.match(url)
    if match is None:
        is_path = url.startswith(("/", ".", "~")) or "@" not in url
        return url if is_path else f"{HIDDEN}@{url.rpartition('@')[2]}"
    scheme, rest = match[1].lower(), url[match.end() :]
    if scheme == "file":
        return url
    shown = re.split(r"[?#]", rest, maxsplit=1)[0]
    authority, slash, path = shown.partition("/")
    who, at, host = authority.rpartition("@")
    is_odd = "@" in rest[len(authority) :] and scheme not in _REVISIONS
    if is_odd or (scheme in _HOSTS and not _HOST.fullmatch(host)):
        return f"{match[0]}{HIDDEN}"
    if at and scheme in _PLACES:
        host = f"{who.partition(':')[0]}@{host}"
    return f"{match[0]}{host}{slash}{path}"


def redacted_path(path: Path) -> str:
    """Return a path that leads somewhere; otherwise it may be a secret in the wrong variable."""
    try:
        is_path = path.exists() or (len(path.parts) > 1 and path.parent.is_dir())
    except (OSError, ValueError):
        is_path = False
    return str(path) if is_path else HIDDEN

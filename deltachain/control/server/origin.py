"""Origin of a request: the host that it names, and whether a web page sent it."""

from __future__ import annotations

import re
from typing import Final

from fastapi import HTTPException, Request

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
"""Names of the loopback interface, in lower case."""

_HOST: Final = re.compile(
    r"(?:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])"
    r"(?::[0-9]{1,5})?"
)
"""Valid ``Host`` header: a name or an address, and a port."""


def host_of(request: Request) -> str:
    """Return the host of a request, without its port.

    Raises:
        HTTPException: 400 for an invalid ``Host`` header, which proxies interpret differently.
    """
    given = request.headers.getlist("host")
    match = _HOST.fullmatch(given[0]) if len(given) == 1 else None
    if match is None:
        raise HTTPException(400, "the Host header names no host")
    return (match["name"] or match["ipv6"]).lower()


def is_page(request: Request) -> bool:
    """Return whether a web page sent the request, as opposed to a user typing the address.

    Browsers send no ``Origin`` with embedded resources, but ``Sec-Fetch-Site``.
    """
    site = request.headers.get("sec-fetch-site", "none")
    return "origin" in request.headers or site != "none"

"""Who may call the routes of a replica: holders of a token, or programs of the same machine."""

import re
from dataclasses import dataclass
from typing import Final

from fastapi import HTTPException, Request

from deltachain.tokens import Tokens

from .schemas import TOKEN_HEADER

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
"""Names of the loopback interface, in lower case."""

_HOST: Final = re.compile(
    r"(?:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])"
    r"(?::[0-9]{1,5})?"
)
"""Valid ``Host`` header: a name or an address, and a port."""


def host_of(request: Request) -> str:
    """Return the host of a request; 400 for a header that proxies interpret differently."""
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


@dataclass(frozen=True, slots=True)
class Access:
    """The rule of one server.

    ``is_open`` says that the server listens on the loopback interface alone, ``is_guarded`` that
    the engine checks an API key of its own before these routes.
    """

    tokens: Tokens
    is_open: bool
    is_guarded: bool

    def check(self, request: Request) -> None:
        """Refuse a request by 401 or 403 unless its sender may call these routes."""
        host = host_of(request)
        if self.tokens:
            scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
            given = request.headers.get(TOKEN_HEADER, bearer if scheme.lower() == "bearer" else "")
            if not self.tokens.accepts(given):
                raise HTTPException(401, "wrong or missing token")
        elif not self.is_guarded:
            if not self.is_open:
                raise HTTPException(403, "set DELTACHAIN_TOKEN or --api-key to use these routes")
            if host not in LOOPBACK or is_page(request):  # any site's, through a user's browser
                raise HTTPException(403, "web pages need a token: set DELTACHAIN_TOKEN")

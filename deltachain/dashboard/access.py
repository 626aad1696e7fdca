"""Access to the dashboard: its token, and which web pages may ask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from fastapi import HTTPException, Request

from deltachain.control.server import LOOPBACK, host_of
from deltachain.tokens import Tokens

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Headers of every answer: nothing is loaded from elsewhere, no text becomes HTML or code, no page
frames this one."""


class Access:
    """Decides who may read the dashboard.

    Args:
        token: Required bearer token, or a file of them; empty for none, which only the loopback
            interface may have.

    Raises:
        ConfigError: The file is unreadable or invalid.
    """

    def __init__(self, token: str | Path) -> None:
        self._tokens = Tokens(token)

    def check(self, request: Request) -> None:
        """Check a request for data.

        Raises:
            HTTPException: 400 for a malformed ``Host``; 401 for a wrong or missing token; without
                a token, 403 for the pages of other sites, and for other names of this machine,
                which a site can give it.
        """
        host = host_of(request)
        if self._tokens:
            scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
            given = bearer if scheme.lower() == "bearer" else ""
            if not self._tokens.accepts(given):
                raise HTTPException(401, "wrong or missing token")
        elif host not in LOOPBACK or _is_of_another_site(request):
            raise HTTPException(403, "pages of other sites may not read this: set DELTACHAIN_TOKEN")


def _is_of_another_site(request: Request) -> bool:
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        return True
    return request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")

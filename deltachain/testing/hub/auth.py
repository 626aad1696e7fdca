"""Who asks, and what for: user access tokens, tokens for the CAS, signed addresses of xorbs."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from pathlib import Path
from typing import Final, Literal, TypeAlias

Right: TypeAlias = Literal["read", "write"]

_BEARER: Final = "Bearer "


class AccessDenied(Exception):  # noqa: N818
    """The caller may not do this: ``status`` is 401 or 403."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def bearer(header: str | None) -> str:
    """The token in an Authorization header; empty without one."""
    return header.removeprefix(_BEARER) if header and header.startswith(_BEARER) else ""


def check_right(tokens: dict[str, str], header: str | None, right: Right) -> None:
    """Let a user access token pass that has a right.

    Raises:
        Refused: It does not, or is none.
    """
    granted = tokens.get(bearer(header))
    if granted is None:
        raise AccessDenied(401, "Invalid credentials in Authorization header")
    if right == "write" and granted != "write":
        raise AccessDenied(403, "Forbidden: this token has no write access to this bucket")


class Signer:
    """Makes tokens that need no table: they hold across a restart, until they expire."""

    def __init__(self, folder: Path) -> None:
        path = folder / "secret"
        if not path.exists():
            temporary = folder / "secret.tmp"
            temporary.write_bytes(secrets.token_bytes(32))
            temporary.replace(path)
        self._secret = path.read_bytes()

    def sign(self, subject: str, expires: int) -> str:
        """A token for a subject that has no dot in it."""
        return f"{subject}.{expires}.{self._mac(subject, expires)}"

    def check(self, token: str) -> str:
        """The subject of a token.

        Raises:
            Refused: It has expired, or was not made here.
        """
        subject, _, rest = token.partition(".")
        expires, _, mac = rest.partition(".")
        if not expires.isdigit() or not hmac.compare_digest(mac, self._mac(subject, int(expires))):
            raise AccessDenied(401, "the token was not made here")
        if int(expires) <= time.time():
            raise AccessDenied(401, "the token has expired")
        return subject

    def check_cas(self, header: str | None, right: Right) -> None:
        """Let a token for the CAS pass that has a right.

        Raises:
            Refused: It does not, has expired, or is none.
        """
        granted = self.check(bearer(header))
        if granted not in ("xet-read", "xet-write"):
            raise AccessDenied(401, "the token is not for the CAS")
        if right == "write" and granted != "xet-write":
            raise AccessDenied(403, "the token may only read")

    def _mac(self, subject: str, expires: int) -> str:
        text = f"{subject}.{expires}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

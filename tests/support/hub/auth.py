"""Authorization: user access tokens, CAS tokens, signed xorb URLs."""

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
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def bearer(header: str | None) -> str:
    return header.removeprefix(_BEARER) if header and header.startswith(_BEARER) else ""


def check_right(tokens: dict[str, str], header: str | None, right: Right) -> None:
    granted = tokens.get(bearer(header))
    if granted is None:
        raise AccessDenied(401, "Invalid credentials in Authorization header")
    if right == "write" and granted != "write":
        raise AccessDenied(403, "Forbidden: this token has no write access to this bucket")


class Signer:
    def __init__(self, folder: Path) -> None:
        path = folder / "secret"
        if not path.exists():
            temporary = folder / "secret.tmp"
            temporary.write_bytes(secrets.token_bytes(32))
            temporary.replace(path)
        self._secret = path.read_bytes()

    def sign(self, subject: str, expires: int) -> str:
        return f"{subject}.{expires}.{self._mac(subject, expires)}"

    def check(self, token: str) -> str:
        subject, _, rest = token.partition(".")
        expires, _, mac = rest.partition(".")
        if not expires.isdigit() or not hmac.compare_digest(mac, self._mac(subject, int(expires))):
            raise AccessDenied(401, "the token was not made here")
        if int(expires) <= time.time():
            raise AccessDenied(401, "the token has expired")
        return subject

    def check_cas(self, header: str | None, right: Right) -> None:
        granted = self.check(bearer(header))
        if granted not in ("xet-read", "xet-write"):
            raise AccessDenied(401, "the token is not for the CAS")
        if right == "write" and granted != "xet-write":
            raise AccessDenied(403, "the token may only read")

    def _mac(self, subject: str, expires: int) -> str:
        text = f"{subject}.{expires}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

"""Tokens: the secrets that a server accepts and a client sends, given as text or in a file.

A file is read again when it changes, so that a token is replaced without a restart and without a
failed call: write the new token above the old one, and remove the old one once every server and
client has read both.
"""

import hmac
import logging
from pathlib import Path
from threading import Lock
from typing import Final

from deltachain.errors import ConfigError
from deltachain.redact import redacted_path

LARGEST: Final = 1 << 16  # size limit of a file, in bytes

_HINT: Final = "write one token a line, in printable ASCII characters"

logger = logging.getLogger(__name__)


class Tokens:
    """The current tokens, the preferred one first; thread-safe.

    A file that becomes unreadable, empty or invalid is reported once, and its last tokens stay in
    use: a server never becomes open because of a failed write.
    """

    def __init__(self, given: str | Path = "") -> None:
        self._file = given if isinstance(given, Path) else None
        self._lock = Lock()
        self._reported = False
        self._seen: tuple[int, ...] = ()
        self._tokens: tuple[str, ...] = ()
        if self._file is not None:
            self._seen = _identity(self._file)
            self._tokens = _read(self._file)
        elif isinstance(given, str) and given.strip():
            self._tokens = (given.strip(),)

    @property
    def current(self) -> tuple[str, ...]:
        if self._file is None:
            return self._tokens
        with self._lock:
            self._refresh(self._file)
            return self._tokens

    def accepts(self, given: str) -> bool:
        """Return whether ``given`` is one of the tokens, in a time that does not tell which."""
        equal = [hmac.compare_digest(given.encode(), token.encode()) for token in self.current]
        return any(equal)

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def _refresh(self, file: Path) -> None:
        try:
            seen = _identity(file)
            if seen == self._seen:
                return
            self._tokens = _read(file)
        except ConfigError as exc:
            if not self._reported:
                logger.warning("%s; the tokens read before stay in use", exc.args[0])
            self._reported = True
        else:
            self._seen, self._reported = seen, False


def _identity(file: Path) -> tuple[int, ...]:
    """Return what changes with the content, also of a file behind a link that is replaced."""
    try:
        found = file.stat()
    except (OSError, ValueError) as exc:
        raise _unreadable(file, exc) from exc
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(file: Path) -> tuple[str, ...]:
    try:
        with file.open("rb") as opened:
            data = opened.read(LARGEST + 1)
        text = data.decode("ascii")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file} has characters other than ASCII", hint=_HINT) from exc
    except (OSError, ValueError) as exc:
        raise _unreadable(file, exc) from exc
    if len(data) > LARGEST:
        raise ConfigError(f"{file} has more than {LARGEST} bytes", hint=_HINT)
    found = tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not found:
        raise ConfigError(f"{file} has no token", hint=_HINT)
    if not all(token.isprintable() for token in found):
        raise ConfigError(f"{file} has characters that cannot be printed", hint=_HINT)
    return found


def _unreadable(file: Path, exc: OSError | ValueError) -> ConfigError:
    why = getattr(exc, "strerror", None) or "it cannot be read"
    return ConfigError(f"{redacted_path(file)}: {why}", hint="name a file with one token a line")

"""Presence records: what a replica writes of itself, and what a reader makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Final, Literal

import msgspec

from deltachain.errors import MalformedError
from deltachain.format.json_guards import check_values, decode
from deltachain.status import Answer, Status

LARGEST: Final = 1 << 18
"""Size limit of a record, in bytes."""

TEXT: Final = 500
"""Size limit of a text that a reader keeps, in characters."""

_NUMBERS: Final = ("version", "staged", "head", "lag_versions")
_TIMES: Final = ("looked_at", "applied_at", "committed_at", "silence_s", "age_s")
_TEXTS: Final = (
    "url",
    "chain",
    "manifest",
    "state",
    "reason",
    "trouble",
    "doubt",
    "fault",
    "engine",
)
_MOST: Final = (1 << 53) - 1


class PresenceRecord(Answer, frozen=True, kw_only=True):
    """The presence of one replica; nobody signs it, and a reader believes it no more than that.

    Attributes:
        presence: Number of this format.
        time: When it was written, in seconds since 1970, on the replica's clock. Its age is taken
            from the store's clock instead.
        status: The status of the replica, as its ``status`` route would answer.
        software: Versions, by name of the software.
        ended: Why the replica has ended; empty if it ended as it was told to, and null if it lives.
    """

    presence: Literal[1] = 1
    time: float
    status: Status
    software: dict[str, str] = msgspec.field(default_factory=dict)
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class PresenceFound:
    """A presence record that was read.

    Attributes:
        status: The status of the replica when it wrote.
        age_s: Seconds since then, by the store's clock.
        ended: As of :class:`PresenceRecord`.
    """

    status: Status
    age_s: float
    ended: str | None = None


def encode_record(record: PresenceRecord) -> bytes:
    """Return a record as JSON of at most ``LARGEST`` bytes.

    If it would be larger, replies of ranks, lists of tensors and the last receipt are left out.
    """
    data = msgspec.json.encode(record)
    if len(data) <= LARGEST:
        return data
    brief = msgspec.structs.replace(record.status, ranks=[], on_host={}, classes={}, last=None)
    brief = msgspec.structs.replace(
        brief, **{name: (getattr(brief, name) or "")[:TEXT] for name in ("reason", "trouble")}
    )
    return msgspec.json.encode(msgspec.structs.replace(record, status=brief))


def parse_record(data: bytes, key: str) -> PresenceRecord:
    """Parse a record, whoever wrote it; long texts are cut.

    Args:
        data: At most ``LARGEST`` bytes.
        key: Key of the object, for errors.

    Raises:
        MalformedError: It is no presence record, or a number is out of range.
    """
    check_values(data, key)
    try:
        record = decode(data, PresenceRecord)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise MalformedError(f"no presence record: {str(exc)[:200]}", key=key) from exc
    status = record.status
    for name in _NUMBERS:
        number = getattr(status, name)
        if number is not None and not 0 <= number <= _MOST:
            raise MalformedError(f"no presence record: {name} is out of range", key=key)
    for name in _TIMES:
        seconds = getattr(status, name)
        if seconds is not None and not (isfinite(seconds) and 0 <= seconds <= _MOST):
            raise MalformedError(f"no presence record: {name} is out of range", key=key)
    texts = {name: getattr(status, name) for name in (*_TEXTS, "deltachain")}
    cut = {name: text[:TEXT] for name, text in texts.items() if text and len(text) > TEXT}
    ended = record.ended[:TEXT] if record.ended else record.ended
    status = msgspec.structs.replace(status, **cut, ranks=[], on_host={}, classes={}, last=None)
    return msgspec.structs.replace(record, status=status, ended=ended, software={})

"""Whether a publisher or a follower would work in this environment, and why not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from deltachain.errors import DeltaChainError


class Grade(StrEnum):
    OK = "ok"
    NOTE = "note"
    FAULT = "fault"


class Role(StrEnum):
    FOLLOWER = "follower"
    PUBLISHER = "publisher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str  # name of the check that made it
    grade: Grade  # a fault keeps the role from working as it is set up; a note may be intended
    said: str  # what was found; contains no secret
    hint: str = ""  # what to do; empty if there is nothing to do


def ok(check: str, said: str) -> Finding:
    return Finding(check=check, grade=Grade.OK, said=said)


def note(check: str, said: str, hint: str = "") -> Finding:
    return Finding(check=check, grade=Grade.NOTE, said=said, hint=hint)


def fault(check: str, said: str, hint: str = "") -> Finding:
    return Finding(check=check, grade=Grade.FAULT, said=said, hint=hint)


def failed(check: str, exc: DeltaChainError) -> Finding:
    return fault(check, str(exc.args[0]) if exc.args else type(exc).__name__, exc.hint)


def tried(check: str, attempt: Callable[[], str]) -> Iterator[Finding]:
    try:
        yield ok(check, attempt())
    except DeltaChainError as exc:
        yield failed(check, exc)

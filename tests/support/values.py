"""Values and states that a test needs."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return a value that must not be ``None``."""
    assert value is not None
    return value


def eventually(check: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Wait until ``check`` returns a true value."""
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)

"""The game limits its connections with the code of the dashboard, and has a copy of its own."""

from __future__ import annotations

import inspect

import connections
from deltachain.dashboard import app as dashboard


def test_the_copy_is_the_same() -> None:
    for name in ("LimitedHttp", "limited"):
        assert inspect.getsource(getattr(connections, name)) == inspect.getsource(
            getattr(dashboard, name)
        )

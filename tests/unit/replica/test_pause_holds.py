"""Looks at an engine while it is paused for a swap: the pause is ours, not another client's."""

from __future__ import annotations

from typing import Any

import pytest

from deltachain.replica.target import PauseHolds


class Paused:
    """An engine; ``meanwhile`` is called once a pause has taken effect, before it returns."""

    def __init__(self) -> None:
        self.is_held = False
        self.meanwhile: Any = lambda: None

    def is_paused(self) -> bool:
        return self.is_held

    def pause(self, *, in_doubt: bool = False) -> None:
        del in_doubt
        self.is_held = True
        self.meanwhile()

    def resume(self) -> None:
        self.is_held = False


def test_a_look_while_a_pause_takes_effect_does_not_take_it_for_that_of_others() -> None:
    engine: Any = Paused()
    holds = PauseHolds(engine)
    engine.meanwhile = holds.look
    holds.hold()
    holds.look()
    assert not holds.why
    holds.go_on()
    assert not engine.is_held


def test_a_pause_that_failed_is_not_ours() -> None:
    engine: Any = Paused()
    holds = PauseHolds(engine)

    def fail() -> None:
        raise OSError("the engine is gone")

    engine.meanwhile = fail
    with pytest.raises(OSError, match="gone"):
        holds.hold()
    holds.look()
    assert holds.why == "paused by another client"

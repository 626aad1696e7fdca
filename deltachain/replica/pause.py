"""Pauses of a replica: the reasons to stay paused, and the pause mode of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deltachain.errors import ConfigError

if TYPE_CHECKING:  # imports torch, which `deltachain doctor` does without
    from deltachain.replica.engine import Engine


def pause_mode(named: str, modes: Sequence[str]) -> str:
    """Validate and return a pause mode; empty means the first one, the default.

    Raises:
        ConfigError: The engine has no such mode.
    """
    if named and named not in modes:
        raise ConfigError(
            f"the pause mode is none of {', '.join(modes)}",
            hint="name one of them in DELTACHAIN_PAUSE, or unset it for the first one",
        )
    return named or modes[0]


class PauseHolds:
    """Reasons to keep an engine paused: a caller, doubt about weights, a swap, or other clients.

    The engine resumes when no reason is left. If other clients paused it directly, it stays paused
    through a swap, until they or a caller of deltachain resume it.

    Args:
        engine: The replica.

    Attributes:
        paused: Whether a caller of deltachain paused it.
    """

    def __init__(self, engine: Engine) -> None:
        self.paused = False
        self._engine = engine
        self._in_doubt = self._ours = self._others = False
        self._changes = 0

    @property
    def why(self) -> str:
        """Why generation is paused, apart from swaps and doubt; empty if it is not."""
        if self.paused:
            return "paused"
        return "paused by another client" if self._others else ""

    def look(self) -> None:
        """Ask the engine whether another client has paused it; its answer is for ``why``."""
        changes = self._changes
        paused = self._engine.is_paused()
        if not self._ours and changes == self._changes:  # otherwise the pause may be ours
            self._others = paused

    def pause(self) -> None:
        """Pause until ``resume``, regardless of swaps meanwhile."""
        self.hold()
        self.paused = True

    def resume(self) -> None:
        """Resume, regardless of the reasons for the pause."""
        self._engine.resume()
        self._changes += 1
        self.paused = self._ours = self._others = False

    def doubt(self) -> None:
        """Pause until a swap has succeeded."""
        self._in_doubt = True
        self.hold(in_doubt=True)

    def trust(self) -> None:
        """End the doubt, after a successful swap."""
        self._in_doubt = False

    def hold(self, *, in_doubt: bool = False) -> None:
        """Pause for a swap; see :meth:`Engine.pause`."""
        was_ours = self._ours
        if not was_ours:
            self._others = self._engine.is_paused()
        self._changes += 1
        self._ours = True  # before it takes effect: a look meanwhile must not take it for another's
        try:
            self._engine.pause(in_doubt=in_doubt)
        except BaseException:
            self._ours = was_ours
            raise

    def go_on(self) -> None:
        """Resume after a swap, unless another reason to stay paused remains."""
        if self.paused or self._in_doubt:
            return
        if not self._others:
            self._engine.resume()
        self._changes += 1  # first: a look that saw the pause is then void
        self._ours = False

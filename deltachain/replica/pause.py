"""Who keeps a replica from generating, and in which mode an engine pauses."""

from __future__ import annotations

from collections.abc import Sequence

from deltachain.errors import ConfigError
from deltachain.replica.engine import Engine


def pause_mode(named: str, modes: Sequence[str]) -> str:
    """Validate a pause mode; empty means the first, which is the default.

    Raises:
        ConfigError: The engine has no such mode.
    """
    if named and named not in modes:
        raise ConfigError(f"pause mode {named!r} is none of {', '.join(modes)}")
    return named or modes[0]


class PauseHolds:
    """The reasons to keep an engine paused: a caller, doubt about its weights, a swap, or others.

    It resumes when no reason is left. What others paused by the engine's own means stays paused
    through a swap, until they or a caller of ours resume it.

    Args:
        engine: The replica.

    Attributes:
        paused: Whether a caller of ours paused it.
    """

    def __init__(self, engine: Engine) -> None:
        self.paused = False
        self._engine = engine
        self._in_doubt = self._ours = self._others = False

    def pause(self) -> None:
        """Pause until ``resume``, whatever is swapped meanwhile."""
        self.hold()
        self.paused = True

    def resume(self) -> None:
        """Resume, whatever paused it."""
        self._engine.resume()
        self.paused = self._ours = False

    def doubt(self) -> None:
        """Pause until a swap has succeeded."""
        self._in_doubt = True
        self.hold(in_doubt=True)

    def trust(self) -> None:
        """End the doubt: a swap has succeeded."""
        self._in_doubt = False

    def hold(self, *, in_doubt: bool = False) -> None:
        """Pause for a swap; see :meth:`Engine.pause`."""
        if not self._ours:
            self._others = self._engine.is_paused()
        self._engine.pause(in_doubt=in_doubt)
        self._ours = True

    def go_on(self) -> None:
        """Resume after a swap, unless there is another reason not to."""
        if self.paused or self._in_doubt:
            return
        self._ours = False
        if not self._others:
            self._engine.resume()

"""Whether a replica generates, and who said that it should not."""

from __future__ import annotations

from deltachain.replica.engine import Engine


class Serving:
    """Who keeps an engine from generating: a caller, doubt about its weights, a swap, or others.

    It generates again when none of them does. What others paused by the engine's own means stays
    paused through a swap, until they or a caller of ours resume it.

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
        """Generate nothing until ``resume``, whatever is swapped meanwhile."""
        self.hold()
        self.paused = True

    def resume(self) -> None:
        """Generate again, whoever paused it."""
        self._engine.resume()
        self.paused = self._ours = False

    def doubt(self) -> None:
        """Generate nothing until a swap has succeeded."""
        self._in_doubt = True
        self.hold(in_doubt=True)

    def trust(self) -> None:
        """A swap has succeeded."""
        self._in_doubt = False

    def hold(self, *, in_doubt: bool = False) -> None:
        """Stop generating, for a swap; see :meth:`Engine.pause`."""
        if not self._ours:
            self._others = self._engine.is_paused()
        self._engine.pause(in_doubt=in_doubt)
        self._ours = True

    def go_on(self) -> None:
        """Generate again after a swap, unless there is another reason not to."""
        if self.paused or self._in_doubt:
            return
        self._ours = False
        if not self._others:
            self._engine.resume()

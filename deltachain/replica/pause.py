"""Pause of an engine: the reasons to keep it, each of which ends apart."""

from .engine import Engine


class PauseHolds:
    """Reasons to keep an engine paused: a caller, doubt about weights, a swap, or other clients.

    The engine resumes when no reason is left. A pause by other clients outlives a swap.
    """

    def __init__(self, engine: Engine) -> None:
        self.paused = False
        self._engine = engine
        self._in_doubt = self._ours = self._others = False
        self._changes = 0

    @property
    def held(self) -> bool:
        """Whether it is paused for a reason of this leader."""
        return self._ours

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

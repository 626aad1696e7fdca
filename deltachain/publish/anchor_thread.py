"""Thread of a publisher that adds anchors while later versions are published."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future

from deltachain.errors import DeltaChainError
from deltachain.publish.late_anchor import LateAnchor
from deltachain.publish.session import Session
from deltachain.threads import Pool

logger = logging.getLogger(__name__)


class AnchorThread:
    """Adds anchors one after another, beside later versions.

    A failed anchor is logged: its version is committed, and a later one gets the next anchor.

    Args:
        session: The attached publisher.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pool = Pool(1, "deltachain-anchor")
        self._last: Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether old bits exceed ``PublishConfig.anchor_memory`` of this rank."""
        session = self._session
        kept = session.kept_nbytes
        return kept > 0 and kept > session.config.anchor_memory * session.source.held_nbytes

    def after_version(self, topic: str, *, due: bool) -> None:
        """Begin an anchor of the newest version if one is due; wait while too much is kept.

        The version is in flight until then: versions published meanwhile are covered.

        Args:
            topic: Unique name of the anchor among the ranks.
            due: Whether one is due.
        """
        if due:
            self.begin(topic)
        if self.is_full:
            self.wait()

    def begin(self, topic: str) -> None:
        """Begin an anchor of the newest version; call before the next diff.

        Args:
            topic: Unique name of the anchor among the ranks.
        """
        late = self._session.begin_anchor()
        self._last = self._pool.submit(self._add, late, topic)

    def wait(self) -> None:
        """Wait for all anchors on their way; raise an error that nobody foresaw."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def abandon(self, reason: str) -> None:
        """Make anchors on their way fail, before the next part is uploaded."""
        self._session.abandon_anchors(reason)

    def close(self) -> None:
        """Wait for all anchors, and end the thread; may be called again."""
        self._pool.shutdown()

    def _add(self, late: LateAnchor, topic: str) -> None:
        start, session = time.perf_counter(), self._session
        try:
            anchor = session.add_anchor(topic=topic, late=late)
        except DeltaChainError as error:
            logger.warning("no anchor yet, the next version tries again: %s", error)
            return
        logger.info(
            "anchor of version %d, %d B in %.3f s beside %d later versions, %d B of old bits kept",
            anchor.version,
            anchor.nbytes,
            time.perf_counter() - start,
            session.head - anchor.version,
            late.bits.most_nbytes,
        )

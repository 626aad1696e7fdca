"""The publisher: the diff in the training loop, everything else behind it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeAlias

from torch import nn

from deltachain.errors import ConfigError, DeltaChainError, PublisherFencedError
from deltachain.publish.assets import collect_assets
from deltachain.publish.config import PublishConfig
from deltachain.publish.receipt import PublishReceipt
from deltachain.publish.resume import begin
from deltachain.publish.session import Session
from deltachain.publish.snapshot import Diff
from deltachain.publish.source import walk
from deltachain.store import Store, open_store

logger = logging.getLogger(__name__)

Published: TypeAlias = "Future[PublishReceipt]"


class Publisher:
    """Publishes the weights of one model as a chain.

    ``attach`` once, ``publish`` after every optimizer step, ``close`` at the end (or ``with``).
    ``publish`` returns as soon as the diff is taken; one version is in flight at a time, encoded
    and put by one thread of its own. A publish that failed changes nothing: its bits are found
    again by the next diff. Call it from one thread.

    Args:
        config: Settings, or the URL alone.
        store: The store, if it is not to be opened from the URL.

    Attributes:
        last: The newest receipt, if there is one.
    """

    def __init__(self, config: PublishConfig | str, *, store: Store | None = None) -> None:
        self.config = PublishConfig(url=config) if isinstance(config, str) else config
        self.last: PublishReceipt | None = None
        self._store = store or open_store(self.config.url, self.config.storage_options, writer=True)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="deltachain-publish")
        self._session: Session | None = None
        self._in_flight: Published | None = None
        self._busy = False
        self._waiting: list[Published] = []
        self._waiting_step: int | None = None
        self._unsettled: Diff | None = None
        self._fenced: PublisherFencedError | None = None

    def attach(self, model: nn.Module, *, assets: Mapping[str, bytes] | None = None) -> Self:
        """Begin or continue the chain, so that its newest version is the model as it is now.

        Blocks until that version is committed: a first anchor can take minutes.

        Args:
            model: On any device, wrapped or not.
            assets: Small files for the chain. Not given: see ``PublishConfig.assets``.

        Raises:
            ConfigError: The model can not be published; the hint says what to do instead.
            ChainMismatchError: The URL holds the chain of another model.
            PublisherFencedError: Another publisher was quicker.
        """
        if self._session is not None:
            raise ConfigError("this publisher is attached already", hint="make another one")
        source = walk(model, dtype=self.config.dtype, checkpoint=self.config.base)
        files = collect_assets(model, self.config) if assets is None else assets
        self._session = begin(self._store, source, self.config, files)
        logger.info("version %d at %s, epoch %d", self.version, self.url, self.epoch)
        return self

    @property
    def url(self) -> str:
        """Where the chain lies."""
        return self._store.url

    @property
    def version(self) -> int:
        """The newest committed version; -1 before ``attach``."""
        parent = self._session.writer.parent if self._session else None
        return parent.version if parent else -1

    @property
    def epoch(self) -> int:
        """This publisher's epoch; -1 before ``attach``."""
        return self._session.writer.epoch if self._session else -1

    def publish(self, *, step: int | None = None) -> Published:
        """Publish what has changed since the last version.

        While a version is in flight the change is left to the next call (or, as configured, waited
        for); the future then resolves with the version that covers it.

        Returns:
            A future of the receipt; it raises what went wrong.

        Raises:
            DeltaChainError: An earlier publish failed and ``on_error`` is ``raise``.
        """
        session = self._require_session()
        future: Published = Future()
        self._waiting.append(future)
        self._waiting_step = step
        if not self._busy or self.config.when_busy == "wait":
            self._land()
            self._launch(session)
        return future

    def flush(self) -> PublishReceipt | None:
        """Wait until every call of ``publish`` is covered by a committed version.

        Returns:
            The newest receipt, if there is one.

        Raises:
            DeltaChainError: A publish failed and ``on_error`` is ``raise``.
        """
        self._land()
        if self._waiting:
            self._launch(self._require_session())
            self._land()
        return self.last

    def close(self) -> None:
        """Flush, and give everything back. Closing twice is allowed."""
        try:
            self.flush()
            if self._session is not None and self._fenced is None:
                self._session.writer.write_head()
        finally:
            self._pool.shutdown()
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _require_session(self) -> Session:
        if self._session is None:
            raise ConfigError("not attached to a model", hint="call attach(model) first")
        return self._session

    def _land(self) -> None:
        """Wait for the version in flight; its failure is raised, or logged."""
        flight, self._in_flight = self._in_flight, None
        error = flight.exception() if flight is not None else None
        if isinstance(error, PublisherFencedError):
            self._fenced = error
            self._stop(error)
        elif error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise what went wrong, or log it and leave those who wait to the next version."""
        if self.config.on_error == "warn" and isinstance(error, DeltaChainError):
            logger.warning("publish failed, the next version makes up for it: %s", error)
            return
        for future in self._take_waiting():
            future.set_exception(error)
        raise error

    def _stop(self, error: PublisherFencedError) -> None:
        """Another publisher owns the chain: nothing that waits will ever be committed."""
        for future in self._take_waiting():
            future.set_exception(error)
        if self.config.on_error == "raise":
            raise error
        logger.warning("not published: %s", error)

    def _take_waiting(self) -> list[Published]:
        waiting, self._waiting = self._waiting, []
        return [future for future in waiting if future.set_running_or_notify_cancel()]

    def _launch(self, session: Session) -> None:
        """Take the diff, and send it on its way."""
        try:
            self._settle(session)
        except PublisherFencedError as error:
            self._fenced = error
        except DeltaChainError as error:
            self._fail(error)
            return
        if self._fenced is not None:
            self._stop(self._fenced)
            return
        start = time.perf_counter()
        diff = session.snapshot.diff_()
        diff_s = time.perf_counter() - start
        covered, step = self._take_waiting(), self._waiting_step
        self._busy = True
        self._in_flight = self._pool.submit(self._run, session, diff, step, diff_s, covered)

    def _settle(self, session: Session) -> None:
        """Find out whether a commit whose reply was lost has happened."""
        if self._unsettled is not None:
            if session.writer.settle():
                session.snapshot.redo(self._unsettled)
            self._unsettled = None

    def _run(
        self,
        session: Session,
        diff: Diff,
        step: int | None,
        diff_s: float,
        covered: list[Published],
    ) -> PublishReceipt:
        """Commit the diff, then an anchor behind it if one is due; in the publisher's thread."""
        try:
            receipt = session.commit_diff(diff, step=step, diff_s=diff_s)
        except BaseException as error:
            session.snapshot.restore(diff)
            if session.writer.uncertain:
                self._unsettled = diff
            self._busy = False
            for future in covered:
                future.set_exception(error)
            raise
        self.last = receipt
        logger.info("%s", receipt)
        try:
            _add_anchor(session)
        finally:
            self._busy = False  # first: whoever waits for the result may publish again at once
            for future in covered:
                future.set_result(receipt)
        return receipt


def _add_anchor(session: Session) -> None:
    """Add an anchor if one is due; the version is committed, whether or not that works."""
    try:
        anchor = session.add_anchor()
    except DeltaChainError as error:
        logger.warning("no anchor yet, the next version tries again: %s", error)
        return
    if anchor is not None:
        logger.info("anchor of version %d, %d B", anchor.version, anchor.nbytes)

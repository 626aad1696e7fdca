"""The publisher: the diff in the training loop, everything else behind it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias

from torch import nn
from torch.distributed import ProcessGroup

from deltachain.errors import (
    ChainError,
    ConfigError,
    DeltaChainError,
    PublisherFencedError,
    RankError,
)
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.assets import checked, collect_assets
from deltachain.publish.model.source import Live, walk
from deltachain.publish.ranks.barrier import Decision, PublishBarrier
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.ranks.collectives import FAILURES, broadcast
from deltachain.publish.receipt import PublishReceipt
from deltachain.publish.resume import begin
from deltachain.publish.session import EdgeShare, Session
from deltachain.publish.snapshot import Diff
from deltachain.publish.upload import EdgeKeys
from deltachain.store import Store, open_store
from deltachain.threads import Pool
from deltachain.types import Version

logger = logging.getLogger(__name__)

Published: TypeAlias = "Future[PublishReceipt]"


class Flight(NamedTuple):
    """A diff on its way to being a version.

    Attributes:
        topic: Under which ranks talk about it.
        diff: What changed; nothing where finding it failed.
        error: Why that failed on this rank: the others are told when they bring their parts.
        diff_s: Seconds it took.
        step: The trainer's.
        covered: The calls of ``publish`` that it answers.
    """

    topic: str
    diff: Diff
    error: Exception | None
    diff_s: float
    step: int | None
    covered: list[Published]

    def put(self, session: Session, slot: EdgeKeys) -> EdgeShare:
        """This rank's part of it."""
        if self.error is not None:
            raise self.error
        return session.put_delta(slot, self.diff)


class Publisher:
    """Publishes the weights of one model as a chain.

    ``attach`` once, ``publish`` after every optimizer step, ``close`` at the end (or ``with``).
    ``publish`` returns as soon as the diff is taken; one version is in flight at a time, encoded
    and put by one thread of its own. A publish that failed changes nothing: its bits are found
    again by the next diff. Call it from one thread.

    Where ``torch.distributed`` is initialised, every rank makes a publisher and calls the same
    methods; each publishes a part of what it holds, the first one commits. Ranks tell each other
    words through the store of the process group, never weights.

    Args:
        config: Settings, or the URL alone.
        store: The store, if it is not to be opened from the URL.

    Attributes:
        last: The newest receipt, if there is one.

    Example:
        >>> with deltachain.Publisher(new_url).attach(model) as publisher:
        ...     train_step(model, optimizer)
        ...     receipt = publisher.publish(step=1).result()
        >>> receipt.version, receipt.kind
        (1, 'delta')
    """

    def __init__(self, config: PublishConfig | str, *, store: Store | None = None) -> None:
        self.config = PublishConfig(url=config) if isinstance(config, str) else config
        self.last: PublishReceipt | None = None
        self._store = store or open_store(self.config.url, self.config.storage_options, writer=True)
        self._pool = Pool(1, "deltachain-publish")
        self._session: Session | None = None
        self._in_flight: Published | None = None
        self._busy = False
        self._waiting: list[Published] = []
        self._waiting_step: int | None = None
        self._unsettled: tuple[Version, Diff] | None = None
        self._fenced: PublisherFencedError | None = None
        self._failure: DeltaChainError | None = None
        self._ranks = Ranks.alone()
        self._barrier = PublishBarrier(self._ranks)

    def attach(
        self,
        model: nn.Module | Live,
        *,
        assets: Mapping[str, bytes] | None = None,
        group: ProcessGroup | None = None,
        alone: bool = False,
    ) -> Self:
        """Begin or continue the chain, so that its newest version is the model as it is now.

        Blocks until that version is committed: a first anchor can take minutes.

        Args:
            model: On any device, wrapped or not, whole or sharded. Or a function that gives the
                names and tensors of a checkpoint, whole or as DTensors, anew for every version: an
                export of a trainer whose own parameters say nothing of a checkpoint. Each rank
                gives what it has; what several have is published once.
            assets: Small files for the chain. Not given: see ``PublishConfig.assets``.
            group: The ranks that publish, if those are not all of ``torch.distributed``.
            alone: Whether this process was given all of the model, so that other ranks have no part
                in publishing it.

        Raises:
            ConfigError: The model cannot be published; the hint says what to do instead.
            ChainMismatchError: The URL holds the chain of another model.
            PublisherFencedError: Another publisher was quicker.
            RankError: Another rank could not do its part.
        """
        if self._session is not None:
            raise ConfigError("this publisher is attached already", hint="make another one")
        config = self.config
        join = partial(Ranks.join, group, deadline_s=config.deadline_s)
        self._ranks = Ranks.alone() if alone else join()
        session = begin(
            self._store,
            lambda: walk(model, dtype=config.dtype, checkpoint=config.base),
            config,
            lambda: collect_assets(model, config) if assets is None else checked(assets, config),
            self._ranks,
        )
        session.ranks = self._ranks.clone()  # for the thread that commits
        self._barrier = PublishBarrier(self._ranks)
        self._session = session
        logger.info("version %d at %s, epoch %d", self.version, self.url, self.epoch)
        return self

    @property
    def url(self) -> str:
        """Where the chain lies."""
        return self._store.url

    @property
    def version(self) -> int:
        """The newest committed version; -1 before ``attach``."""
        return self._session.head if self._session else -1

    @property
    def epoch(self) -> int:
        """This publisher's epoch; -1 before ``attach``."""
        return self._session.writer.epoch if self._session else -1

    @property
    def is_alone(self) -> bool:
        """Whether no other rank publishes with this one."""
        return self._ranks.count == 1

    def publish(self, *, step: int | None = None) -> Published:
        """Publish what has changed since the last version.

        While a version is in flight the change is left to the next call (or, as configured, waited
        for); the future then resolves with the version that covers it. Ranks call this after the
        same steps, and know each other's calls by ``step``.

        Returns:
            A future of the receipt; it raises what went wrong.

        Raises:
            DeltaChainError: An earlier publish failed and ``on_error`` is ``raise``.
        """
        session = self._require_session()
        future: Published = Future()
        self._waiting.append(future)
        self._waiting_step = step
        self._barrier.call(step)
        self._try(session, free=not self._busy or self.config.when_busy == "wait")
        return future

    def is_left(self, published: Published) -> bool:
        """Whether a call of ``publish`` is left to the next one, which will resolve its future."""
        return published in self._waiting

    def flush(self) -> PublishReceipt | None:
        """Wait until every call of ``publish`` is covered by a committed version.

        Returns:
            The newest receipt, if there is one.

        Raises:
            DeltaChainError: A publish failed and ``on_error`` is ``raise``.
        """
        self._land()
        if self._waiting:
            self._try(self._require_session(), free=True)
            self._land()
        return self.last

    def close(self) -> None:
        """Flush, and give everything back. Closing twice is allowed."""
        try:
            self.flush()
            unsettled, self._unsettled = self._unsettled, None
            if unsettled is not None and self._failure is not None and self._fenced is None:
                said = "closed at version %d; what was trained since may not be published: %s"
                logger.warning(said, self.version, self._failure)
            if self._session is not None and self._fenced is None and self._ranks.leads:
                self._session.writer.close()
        finally:
            for future in self._take_waiting():  # nothing will cover it any more
                future.set_exception(self._failure or ChainError("closed before it was published"))
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
        if error is not None and self._ranks.count > 1:
            for future in self._take_waiting():  # the other ranks may never meet this one again
                future.set_exception(RankError("training ended before this was published"))
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
            self._failure = error
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

    def _try(self, session: Session, *, free: bool) -> None:
        """Launch, if all ranks are free to."""
        try:
            decision = self._barrier.wait(free=free, settle=self._settle)
        except DeltaChainError as error:
            if not self._busy:
                self._land()  # what failed before is said first
            if isinstance(error, PublisherFencedError):
                self._fenced = error
                self._stop(error)
            else:
                self._fail(error)
        else:
            if decision.go:
                self._land()
                self._launch(session, decision)

    def _settle(self) -> Version:
        """The newest committed version, once nothing is in flight; on the first rank."""
        if self._fenced is not None:
            raise self._fenced
        if self._in_flight is not None:
            wait([self._in_flight])
        return self._require_session().settle()

    def _launch(self, session: Session, decision: Decision) -> None:
        """Take the diff, and send it on its way."""
        if self._fenced is not None:
            self._stop(self._fenced)
            return
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None and unsettled[0] <= decision.head:
            session.snapshot.redo(unsettled[1])  # it was committed after all
        session.head = decision.head
        start, diff, failure = time.perf_counter(), {}, None
        try:
            diff = session.snapshot.diff_()
        except FAILURES as error:
            if self._ranks.count == 1:
                raise
            failure = error
        flight = Flight(
            topic=self._barrier.topic,
            diff=diff,
            error=failure,
            diff_s=time.perf_counter() - start,
            step=self._waiting_step,
            covered=self._take_waiting(),
        )
        self._busy = True
        self._in_flight = self._pool.submit(self._run, session, flight)

    def _run(self, session: Session, flight: Flight) -> PublishReceipt:
        """Commit the diff, then an anchor behind it if one is due; in the publisher's thread."""
        try:
            receipt = session.commit(
                "delta",
                partial(flight.put, session),
                topic=flight.topic,
                step=flight.step,
                diff_s=flight.diff_s,
            )
        except BaseException as error:
            session.snapshot.restore(flight.diff)
            self._unsettled = session.head + 1, flight.diff
            self._busy = False
            for future in flight.covered:
                future.set_exception(error)
            raise
        self.last = receipt
        logger.info("%s", receipt)
        try:
            _add_anchor(session, flight.topic)
        finally:
            self._busy = False  # first: whoever waits for the result may publish again at once
            for future in flight.covered:
                future.set_result(receipt)
        return receipt


def _add_anchor(session: Session, topic: str) -> None:
    """Add an anchor if one is due; the version is committed, whether or not that works."""
    try:
        if not broadcast(session.ranks, f"{topic}/due", lambda: session.anchor_due, bool):
            return
        anchor = session.add_anchor(topic=f"{topic}/anchor")
    except DeltaChainError as error:
        logger.warning("no anchor yet, the next version tries again: %s", error)
        return
    logger.info("anchor of version %d, %d B", anchor.version, anchor.nbytes)

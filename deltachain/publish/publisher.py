"""The publisher: the diff in the training loop, everything else behind it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias

from torch import nn
from torch.distributed import ProcessGroup
from typing_extensions import override

from deltachain.closeable import Closeable
from deltachain.errors import (
    ChainError,
    ConfigError,
    DeltaChainError,
    PublisherFencedError,
    RankError,
)
from deltachain.publish.config import PublishConfig
from deltachain.publish.diff import NO_CHANGES, Diff
from deltachain.publish.model.assets import checked, collect_assets
from deltachain.publish.model.source import TensorSource, collect_weights
from deltachain.publish.ranks.barrier import Decision, PublishBarrier
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.ranks.collectives import FAILURES
from deltachain.publish.receipt import PublishReceipt
from deltachain.publish.resume import begin
from deltachain.publish.session import Attempt, Session
from deltachain.store import Store, open_store
from deltachain.threads import Pool
from deltachain.types import Version

logger = logging.getLogger(__name__)

Published: TypeAlias = "Future[PublishReceipt]"


@dataclass(frozen=True, slots=True)
class Flight:
    """A version on its way: made by the caller's thread, committed by the publisher's.

    Attributes:
        version: The number that it will have.
        diff: What changed on this rank; empty where finding it failed.
        attempt: What is committed.
        covered: The calls of ``publish`` that it answers.
        outcome: Its receipt or error; done before any of ``covered`` is.
    """

    version: Version
    diff: Diff
    attempt: Attempt
    covered: Sequence[Published]
    outcome: Published = field(default_factory=Future)


class Publisher(Closeable):
    """Publishes the weights of one model as a chain.

    ``attach`` once, ``publish`` after every optimizer step, ``close`` at the end (or ``with``).
    ``publish`` returns as soon as the diff is taken; one version is in flight at a time, encoded
    and put by one thread of its own. A publish that failed changes nothing: its bits are found
    again by the next diff. Call it from one thread.

    Where ``torch.distributed`` is initialised, every rank makes a publisher and calls the same
    methods; each publishes a part of its weights, rank 0 commits. Ranks send each other small
    messages through the store of the process group, never weights.

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

    # No lock: all attributes but ``last`` belong to the caller's thread. The publisher's thread
    # works on a session and a frozen flight; the caller's touches neither before the flight's
    # outcome is done, apart from reading the number ``session.head``. ``last`` is one reference,
    # replaced at once.

    def __init__(self, config: PublishConfig | str, *, store: Store | None = None) -> None:
        self.config = PublishConfig(url=config) if isinstance(config, str) else config
        self.last: PublishReceipt | None = None
        self._store = store or open_store(self.config.url, self.config.storage_options, writer=True)
        self._pool = Pool(1, "deltachain-publish")
        self._session: Session | None = None
        self._flight: Flight | None = None
        self._landed: Future[None] | None = None
        self._waiting: list[Published] = []
        self._waiting_step: int | None = None
        self._failed: Flight | None = None
        self._fenced: PublisherFencedError | None = None
        self._failure: DeltaChainError | None = None
        self._ranks = Ranks.alone()
        self._barrier = PublishBarrier(self._ranks)

    def attach(
        self,
        model: nn.Module | TensorSource,
        *,
        assets: Mapping[str, bytes] | None = None,
        group: ProcessGroup | None = None,
        alone: bool = False,
    ) -> Self:
        """Begin or continue the chain, so that its newest version is the model as it is now.

        Blocks until that version is committed: a first anchor can take minutes.

        Args:
            model: On any device, wrapped or not, whole or sharded. Or an export: a function that
                yields the names and tensors of a checkpoint, whole or as DTensors, anew for every
                version, for trainers whose parameters are not those of a checkpoint. Each rank
                yields the tensors that it has; one on several ranks is published once.
            assets: Small files for the chain. Not given: see ``PublishConfig.assets``.
            group: The ranks that publish, if those are not all of ``torch.distributed``.
            alone: Whether this process has the whole model, and no other rank publishes.

        Raises:
            ConfigError: The model cannot be published; the hint says what to do instead.
            ChainMismatchError: The URL holds the chain of another model.
            PublisherFencedError: Another publisher was first.
            RankError: Another rank failed, or did not answer in time.
        """
        if self._session is not None:
            raise ConfigError("this publisher is attached already", hint="make another one")
        config = self.config
        join = partial(Ranks.join, group, deadline_s=config.deadline_s)
        self._ranks = Ranks.alone() if alone else join()
        session = begin(
            self._store,
            lambda: collect_weights(model, dtype=config.dtype, checkpoint=config.base),
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
        """Publish the changes since the last version.

        While a version is in flight, the changes are left to the next call, or waited for if so
        configured; the future then resolves with the version that covers them. Ranks call this
        after the same steps, and match their calls by ``step``.

        Returns:
            A future of the receipt, or of the error.

        Raises:
            DeltaChainError: An earlier publish failed and ``on_error`` is ``raise``.
        """
        session = self._require_session()
        future: Published = Future()
        self._waiting.append(future)
        self._waiting_step = step
        self._barrier.call(step)
        self._try(session, free=not self._is_busy or self.config.when_busy == "wait")
        return future

    def is_left(self, published: Published) -> bool:
        """Whether a call of ``publish`` was left to the next one, which resolves its future."""
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

    @override
    def close(self) -> None:
        """Flush, and release all resources. Closing twice is allowed."""
        try:
            self.flush()
            failed, self._failed = self._failed, None
            if failed is not None and self._failure is not None and self._fenced is None:
                logger.warning(
                    "closed at version %d; what was trained since may not be published: %s",
                    self.version,
                    self._failure,
                )
            if self._session is not None and self._fenced is None and self._ranks.leads:
                self._session.writer.close()
        finally:
            for future in self._take_waiting():  # nothing will cover it any more
                future.set_exception(self._failure or ChainError("closed before it was published"))
            self._pool.shutdown()
            self._store.close()

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._ranks.count > 1:
            for future in self._take_waiting():  # a flush would wait for ranks that may not come
                future.set_exception(RankError("training ended before this was published"))
        super().__exit__(kind, error, traceback)

    @property
    def _is_busy(self) -> bool:
        return self._flight is not None and not self._flight.outcome.done()

    def _require_session(self) -> Session:
        if self._session is None:
            raise ConfigError("not attached to a model", hint="call attach(model) first")
        return self._session

    def _land(self) -> None:
        """Wait for the version in flight; its failure is raised, or logged."""
        flight, self._flight = self._flight, None
        if flight is None or self._landed is None:
            return
        error = self._landed.exception()  # of an anchor: errors of the version are its outcome
        if flight.outcome.exception() is not None:
            error = flight.outcome.exception()
            self._require_session().snapshot.restore(flight.diff)
            self._failed = flight
        if error is None:
            return
        if isinstance(error, PublisherFencedError):
            self._fenced = error
            self._stop(error)
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise an error; or log it, and leave the waiting calls to the next version."""
        if self.config.on_error == "warn" and isinstance(error, DeltaChainError):
            self._failure = error
            logger.warning("publish failed, the next version makes up for it: %s", error)
            return
        for future in self._take_waiting():
            future.set_exception(error)
        raise error

    def _stop(self, error: PublisherFencedError) -> None:
        """Fail all waiting calls: another publisher owns the chain, none will be committed."""
        for future in self._take_waiting():
            future.set_exception(error)
        if self.config.on_error == "raise":
            raise error
        logger.warning("not published: %s", error)

    def _take_waiting(self) -> list[Published]:
        waiting, self._waiting = self._waiting, []
        return [future for future in waiting if future.set_running_or_notify_cancel()]

    def _try(self, session: Session, *, free: bool) -> None:
        """Launch a version, if every rank is free to."""
        try:
            decision = self._agree(session, free=free)
        except DeltaChainError as error:
            if not self._is_busy:
                self._land()  # an earlier error is raised first
            if isinstance(error, PublisherFencedError):
                self._fenced = error
                self._stop(error)
            else:
                self._fail(error)
        else:
            if decision.go:
                self._land()
                self._launch(session, decision.head)

    def _agree(self, session: Session, *, free: bool) -> Decision:
        """Decide with all ranks whether to publish now; rank 0 first settles earlier commits."""
        with self._barrier.meet() as collective:
            ready = collective.gather(free, bool)
            decision = Decision(go=False)
            if self._ranks.leads and all(ready):
                if self._fenced is not None:
                    raise self._fenced
                if self._flight is not None:
                    wait([self._flight.outcome])
                head = session.settle() if session.writer.uncertain else session.head
                decision = Decision(go=True, head=head)
            return collective.broadcast(decision, Decision)

    def _launch(self, session: Session, head: Version) -> None:
        """Take the diff, and start its commit behind the newest version."""
        if self._fenced is not None:
            self._stop(self._fenced)
            return
        failed, self._failed = self._failed, None
        if failed is not None and failed.version <= head:
            session.snapshot.redo(failed.diff)  # it was committed after all
        session.head = head
        start, diff, failure = time.perf_counter(), NO_CHANGES, None
        try:
            diff = session.snapshot.diff_()
        except FAILURES as error:
            if self._ranks.count == 1:
                raise
            failure = error
        attempt = Attempt(
            topic=self._barrier.topic,
            diff=diff,
            failure=failure,
            step=self._waiting_step,
            diff_s=time.perf_counter() - start,
        )
        flight = Flight(head + 1, diff, attempt, self._take_waiting())
        self._flight = flight
        self._landed = self._pool.submit(self._run, session, flight)

    def _run(self, session: Session, flight: Flight) -> None:
        """Commit a version, then an anchor behind it if one is due; in the publisher's thread."""
        try:
            conclusion = session.commit(flight.attempt)
        except BaseException as error:  # noqa: BLE001 - the futures raise it
            for future in (flight.outcome, *flight.covered):
                future.set_exception(error)
            return
        receipt = self.last = conclusion.receipt
        logger.info("%s", receipt)
        try:
            if conclusion.anchor_due:
                _add_anchor(session, flight.attempt.topic)
        finally:
            for future in (flight.outcome, *flight.covered):
                future.set_result(receipt)


def _add_anchor(session: Session, topic: str) -> None:
    """Add an anchor; the version is committed, whether or not that works."""
    try:
        anchor = session.add_anchor(topic=f"{topic}/anchor")
    except DeltaChainError as error:
        logger.warning("no anchor yet, the next version tries again: %s", error)
        return
    logger.info("anchor of version %d, %d B", anchor.version, anchor.nbytes)

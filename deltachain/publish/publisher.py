"""The publisher: takes the diff in the training loop and commits it in the background."""

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Final, Self, SupportsIndex
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed import ProcessGroup
from typing_extensions import override

from deltachain import errors
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.assets import checked, collect_assets
from deltachain.publish.model.source import TensorSource, collect_weights
from deltachain.publish.quantise.layers import find_layers
from deltachain.publish.ranks.collectives import FAILURES, Decision, PublishBarrier, Ranks
from deltachain.publish.ranks.sharing import agree
from deltachain.publish.session import Attempt, LateAnchor, PublishReceipt, Session, begin
from deltachain.publish.side_threads import PublishTotals, background_work
from deltachain.publish.wire_form import NO_CHANGES, Diff
from deltachain.setting_types import whole
from deltachain.store import Location, Store, open_store
from deltachain.threads import Closeable, Pool
from deltachain.types import Bits, Version

logger = logging.getLogger(__name__)


class Published(Future[PublishReceipt]):
    """Future of the receipt of the version that covers a call of ``publish``.

    ``cover`` is called before a thread waits for the result: the thread that publishes must not
    wait for its own next call.
    """

    def __init__(self, cover: "Callable[[Published], None]") -> None:
        super().__init__()
        self._cover = cover

    @override
    def result(self, timeout: float | None = None) -> PublishReceipt:
        self._cover(self)
        return super().result(timeout)

    @override
    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._cover(self)
        return super().exception(timeout)


@dataclass(frozen=True, slots=True)
class Flight:
    """A version in flight: created by the caller's thread, committed by the publisher's."""

    version: Version
    diff: Diff  # on this rank; empty if it failed
    attempt: Attempt
    covered: Sequence[Published]
    outcome: Future[PublishReceipt] = field(default_factory=Future)  # done before any covered one


def check_every_steps(every_steps: object) -> None:
    if isinstance(every_steps, bool) or not isinstance(every_steps, int) or every_steps < 1:
        raise errors.ConfigError(
            f"every_steps={every_steps!r}: expected 1 or more",
            hint="give the number of optimizer steps for each version; 1 publishes every step",
        )


_open: "Final[WeakKeyDictionary[Publisher, tuple[int, Callable[[], None] | None]]]" = (
    WeakKeyDictionary()
)
"""Process that attached each open publisher, and what closes it: a forked child must not commit its
versions."""


def close_at_exit(publisher: "Publisher", close: Callable[[], None] | None = None) -> None:
    """Close a publisher by ``close`` when Python ends, so that its last version is committed.

    One of several ranks is not closed: the others may have ended, or wait for something else.
    """
    _open[publisher] = os.getpid(), close


@atexit.register
def _close_all() -> None:
    has_failed = getattr(sys, "last_value", None) is not None
    for publisher, (process, close) in list(_open.items()):
        if process != os.getpid():
            continue
        if not publisher.is_alone:
            logger.warning(
                "the publisher at %s was not closed: its last version may not be committed",
                publisher.url,
            )
            continue
        try:
            (publisher.close if has_failed or close is None else close)()
        except errors.DeltaChainError as error:
            logger.warning("closing the publisher at %s as Python ended: %s", publisher.url, error)


class AnchorThread:
    """Adds anchors one after another, beside later versions; a later one follows a failed one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pool = Pool(1, "deltachain-anchor")
        self._last: Future[None] | None = None

    def after_version(self, topic: str, *, due: bool) -> None:
        """Begin an anchor of the newest version if one is due; wait while too much is kept."""
        session = self._session
        if due:
            self._last = self._pool.submit(self._add, session.begin_anchor(), topic)
        kept = session.kept_nbytes
        if kept > 0 and kept > session.config.anchor_memory * session.source.held_nbytes:
            self.wait()

    def wait(self) -> None:
        """Wait for all anchors on their way; raise an error that nobody foresaw."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        self._pool.shutdown()

    def _add(self, late: LateAnchor, topic: str) -> None:
        start, session = time.perf_counter(), self._session
        try:
            anchor = session.add_anchor(late, topic=topic)
        except errors.DeltaChainError as error:
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


class Publisher(Closeable):
    """Publisher of one model's weights as a chain.

    Call ``attach`` once, ``publish`` after every optimizer step, and ``close`` at the end (or use
    ``with``). ``publish`` returns once the diff is taken; one version is in flight at a time,
    encoded and uploaded by another thread. After a failed or interrupted one, the next finds its
    changes again. Not thread-safe.

    With ``torch.distributed`` initialised, every rank creates a publisher and calls the same
    methods; each publishes a part of the weights, and rank 0 commits. Ranks exchange small messages
    through the store of the process group, never weights.

    Args:
        config: Settings, or the URL or the folder alone.
        store: An open store to use instead of the URL's.

    Attributes:
        last: The newest receipt, if any.
        totals: Totals of all versions so far, for metrics.

    Examples:
        >>> with deltachain.Publisher(new_url).attach(model) as publisher:
        ...     train_step(model, optimizer)
        ...     receipt = publisher.publish(step=1).result()
        >>> receipt.version, receipt.kind
        (1, 'delta')
    """

    # No lock: all attributes except ``last``, one reference, belong to the caller's thread. The
    # publisher's thread uses a session and a frozen flight; the caller's uses neither before the
    # flight's outcome is done, except ``session.head``. Anchors use ``Session.begin_anchor``'s.

    def __init__(self, config: PublishConfig | Location, *, store: Store | None = None) -> None:
        self.config = PublishConfig.of(config)
        self.last: PublishReceipt | None = None
        self.totals = PublishTotals()
        self._store = store or open_store(self.config.url, self.config.storage_options, writer=True)
        self._pool = Pool(1, "deltachain-publish")
        self._session: Session | None = None
        self._flight: Flight | None = None
        self._landed: Future[None] | None = None
        self._is_closed = False
        self._anchors: AnchorThread | None = None
        self._closing = ExitStack()  # ends all threads, then closes the store
        self._closing.callback(self._store.close)
        self._waiting: list[Published] = []  # calls that no version covers yet
        self._step: int | None = None
        self._caller: int | None = None
        self._failed: Flight | None = None
        self._is_torn = False  # whether a call was interrupted: the snapshot is of no version
        self._fenced: errors.PublisherFencedError | None = None
        self._failure: errors.DeltaChainError | None = None
        self._ranks = Ranks.alone()
        self._barrier = PublishBarrier(self._ranks)

    def attach(
        self,
        model: nn.Module | TensorSource,
        *,
        assets: Mapping[str, bytes] | None = None,
        group: ProcessGroup | None = None,
        alone: bool = False,
        common: Mapping[str, object] | None = None,
    ) -> Self:
        """Create or continue the chain, so that its newest version equals the current model.

        Blocks until that version is committed: a first anchor can take minutes.

        Args:
            model: Model on any device, wrapped or not, whole or sharded. Or an export: a function
                that yields names and tensors of a checkpoint, whole or as DTensors, anew for every
                version, for trainers with parameters unlike the checkpoint's. Each rank yields its
                tensors; a tensor on several ranks is published once.
            assets: Small files for the chain; by default those of ``PublishConfig.assets``.
            group: Process group of the publishing ranks; by default all ranks.
            alone: Whether this process has the whole model, and no other rank publishes.
            common: Settings of the caller that must be the same on all ranks, by name.

        Raises:
            ConfigError: The model cannot be published, or the ranks have different settings.
            ChainMismatchError: The URL has the chain of another model.
            PublisherFencedError: Another publisher was first.
            RankError: Another rank failed, or did not answer in time.
        """
        if self._session is not None:
            raise errors.ConfigError("this publisher is attached already", hint="make another one")
        config = self.config
        self._ranks = Ranks.alone() if alone else Ranks.join(group, deadline_s=config.deadline_s)
        agree(config, self._ranks, url=self.url, further=common)
        session = begin(
            self._store,
            lambda: collect_weights(
                model, dtype=config.dtype, checkpoint=config.base, alone=self.is_alone
            ),
            config,
            lambda: collect_assets(model, config) if assets is None else checked(assets, config),
            self._ranks,
            partial(find_layers, model),
        )
        session.ranks = self._ranks.clone()  # for the publisher's thread
        session.anchor_ranks = self._ranks.clone()
        self._barrier = PublishBarrier(self._ranks)
        self._session, self._anchors = session, AnchorThread(session)
        close_at_exit(self)
        leads = self._ranks.leads
        self._closing.push(background_work(session.writer, config, self.totals, leads=leads))
        self._closing.callback(self._anchors.close)
        self._closing.callback(self._pool.shutdown)
        logger.info("version %d at %s, epoch %d", self.version, self.url, self.epoch)
        return self

    @property
    def url(self) -> str:
        """Location of the chain."""
        return self._store.url

    @property
    def version(self) -> int:
        """The newest committed version; -1 before ``attach``."""
        return self._session.head if self._session else -1

    @property
    def epoch(self) -> int:
        """Epoch of this publisher; -1 before ``attach``."""
        return self._session.writer.epoch if self._session else -1

    @property
    def is_alone(self) -> bool:
        """Whether this is the only publishing rank."""
        return self._ranks.count == 1

    def bits(self, name: str) -> Bits:
        """Return the flat bits of an exported tensor as published last, on the host: a view."""
        return self._require_session().snapshot.compared(name)

    def publish(self, *, step: int | None = None) -> Published:
        """Publish the changes since the last version.

        While a version is in flight, the changes are left to the next call, or this call waits with
        ``when_busy="wait"``; the future resolves with the version that covers them. Without other
        ranks, the thread that calls this may wait for the result at once. Ranks call this after the
        same steps; calls are matched by ``step``.

        Returns:
            Future of the receipt or error.

        Args:
            step: Step of the trainer, a whole number of any integer type.

        Raises:
            ConfigError: ``step`` is no whole number, or the publisher is closed or not attached.
            DeltaChainError: An earlier publish failed and ``on_error`` is ``raise``.
        """
        session = self._require_session()
        if self._is_closed:
            raise errors.ConfigError(
                "this publisher is closed", hint="make another one: it goes on here"
            )
        future = self._add_call(step)
        self._caller = get_ident()
        self._try(session, free=not self._is_busy or self.config.when_busy == "wait")
        return future

    def publish_rest(self, *, step: int | None = None) -> None:
        """Publish the changes since the last version, if any; all ranks call it after training.

        Raises:
            DeltaChainError: A publish failed and ``on_error`` is ``raise``.
        """
        self.flush()
        if self._fenced is None or not self.is_alone:
            self._add_call(step)
            self._try(self._require_session(), free=True, only_changes=True)

    def flush(self) -> PublishReceipt | None:
        """Wait until every call of ``publish`` is covered by a committed version, and for anchors.

        Returns:
            The newest receipt, if any.

        Raises:
            DeltaChainError: A publish failed and ``on_error`` is ``raise``.
        """
        self._land()
        if self._waiting:
            self._try(self._require_session(), free=True)
            self._land()
        if self._anchors is not None:
            self._anchors.wait()
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
        except (KeyboardInterrupt, SystemExit):
            if self._session is not None:
                self._session.abandon_anchors("the publisher was interrupted")
            raise
        finally:
            self._is_closed = True
            self._refuse_calls(self._failure or errors.ChainError("closed before it was published"))
            _open.pop(self, None)
            self._closing.close()

    @override
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and self._ranks.count > 1:
            # A flush would wait for ranks that may not come.
            self._refuse_calls(errors.RankError("training ended before this was published"))
        super().__exit__(kind, error, traceback)

    def _add_call(self, step: SupportsIndex | None) -> Published:
        hint = "give an int, such as the number of optimizer steps, or leave step out"
        self._step = None if step is None else whole("step", step, hint=hint)
        self._barrier.call(self._step)
        future = Published(self._cover)
        self._waiting.append(future)
        return future

    def _take_calls(self) -> list[Published]:
        """Forget the waiting calls; return their futures that were not cancelled."""
        calls, self._waiting = self._waiting, []
        return [future for future in calls if future.set_running_or_notify_cancel()]

    def _refuse_calls(self, error: BaseException) -> None:
        for future in self._take_calls():
            future.set_exception(error)

    @property
    def _is_busy(self) -> bool:
        return self._flight is not None and not self._flight.outcome.done()

    def _require_session(self) -> Session:
        if self._session is None:
            raise errors.ConfigError("not attached to a model", hint="call attach(model) first")
        attached, _ = _open.get(self, (os.getpid(), None))
        if attached != os.getpid():  # where no thread would commit
            raise errors.ConfigError(
                f"this publisher was attached in process {attached}, of which this one is a fork",
                hint="attach in the process that trains, once it was forked",
            )
        return self._session

    def _land(self) -> None:
        """Wait for the version in flight; raise or log its failure."""
        flight = self._flight
        if flight is None or self._landed is None or self._is_torn:
            return
        error = self._landed.exception()  # an anchor's begin: those of the version are its outcome
        self._is_torn, self._flight = True, None
        if flight.outcome.exception() is not None:
            error = flight.outcome.exception()
            self._require_session().restore(flight.diff)
            self._failed = flight
        self._is_torn = False
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise an error, or log it and leave the waiting calls to the next version."""
        if isinstance(error, errors.PublisherFencedError):
            self._fenced = error
            self._stop(error)
            return
        if self.config.on_error == "warn" and isinstance(error, errors.DeltaChainError):
            self._failure = error
            logger.warning("publish failed, the next version makes up for it: %s", error)
            return
        self._refuse_calls(error)
        raise error

    def _stop(self, error: errors.PublisherFencedError) -> None:
        """Fail all waiting calls: another publisher owns the chain, so none will be committed."""
        self._require_session().abandon_anchors("another publisher owns the chain")
        self._refuse_calls(error)
        if self.config.on_error == "raise":
            raise error
        logger.warning("not published: %s", error)

    def _cover(self, published: Published) -> None:
        """Publish now what was left to the next call, if that call's own thread waits for it.

        Ranks do not: all would have to wait at once.
        """
        if self.is_alone and get_ident() == self._caller and published in self._waiting:
            self._try(self._require_session(), free=True)
            if published in self._waiting and self._failure is not None:  # it would wait for ever
                self._refuse_calls(self._failure)

    def _try(self, session: Session, *, free: bool, only_changes: bool = False) -> None:
        """Launch a version, if no rank has one in flight."""
        try:
            if self._is_torn:
                self._mend(session)
            decision = self._agree(session, free=free)
        except errors.DeltaChainError as error:
            if not self._is_busy:
                self._land()  # an earlier error is raised first
            self._fail(error)
        else:
            if decision.go:
                self._land()
                self._launch(session, decision.head, only_changes=only_changes)

    def _mend(self, session: Session) -> None:
        """Take the snapshot anew after an interrupted call, and publish what it lacked."""
        if not self.is_alone:
            raise errors.RankError(
                "an earlier call of publish was interrupted on this rank",
                hint="attach another publisher on every rank: the chain continues from its head",
            )
        self._pool.submit(int).result()  # a version on its way was committed, or failed
        flight, self._flight, self._failed = self._flight, None, None
        for future in flight.covered if flight and not flight.outcome.done() else ():
            future.set_exception(errors.ChainError("publish was interrupted before this began"))
        session.renew(self._step)
        self._is_torn = False

    def _agree(self, session: Session, *, free: bool) -> Decision:
        """Agree with all ranks whether to publish now; rank 0 first settles earlier commits."""
        with self._barrier.meet() as collective:
            ready = collective.gather(free, bool)
            decision = Decision(go=False)
            if self._ranks.leads and all(ready):
                if self._fenced is not None:
                    raise self._fenced
                if self._flight is not None:
                    wait([self._flight.outcome])
                decision = Decision(go=True, head=session.settle())
            return collective.broadcast(decision, Decision)

    def _launch(self, session: Session, head: Version, *, only_changes: bool) -> None:
        if self._fenced is not None:
            self._stop(self._fenced)
            return
        self._is_torn = True
        failed, self._failed = self._failed, None
        if failed is not None and failed.version <= head:
            session.redo(failed.diff)  # it was committed after all
        session.head = head
        topic, start = self._barrier.topic, time.perf_counter()
        diff, failure = NO_CHANGES, None
        try:
            diff = session.diff_(topic)
        except Exception as error:
            # Of refusals all changes were put back; handlers of signals raise anything.
            refused = isinstance(error, errors.DeltaChainError)
            self._is_torn = isinstance(error, MemoryError) or (self.is_alone and not refused)
            if self._ranks.count == 1 or not isinstance(error, FAILURES):
                raise
            failure = error
        diff_s = time.perf_counter() - start
        if only_changes:
            self._is_torn = self.is_alone  # ranks put back what they cannot agree on
            if not session.has_changes(topic, diff, failure):
                self._take_calls()
                self._is_torn = False
                return
        attempt = Attempt(topic=topic, diff=diff, failure=failure, step=self._step, diff_s=diff_s)
        self._flight = flight = Flight(head + 1, diff, attempt, self._take_calls())
        self._landed = self._pool.submit(self._run, session, flight)
        self._is_torn = isinstance(failure, MemoryError)

    def _run(self, session: Session, flight: Flight) -> None:
        """Commit a version, and begin an anchor of it if due; runs in the publisher's thread."""
        attempt, futures = flight.attempt, (flight.outcome, *flight.covered)
        try:
            conclusion = session.commit(attempt)
        except BaseException as error:  # noqa: BLE001 - the futures raise it
            self.totals.fail(error)
            for future in futures:
                future.set_exception(error)
            return
        receipt = self.last = conclusion.receipt
        self.totals.count(receipt)
        logger.info("%s", receipt)
        try:
            if self._anchors is not None:
                self._anchors.after_version(f"{attempt.topic}/anchor", due=conclusion.anchor_due)
        finally:
            for future in futures:
                future.set_result(receipt)

"""Work beside a publisher, in threads of its own: heartbeats, maintenance, metrics."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

from deltachain import errors
from deltachain.chain import tags
from deltachain.chain.ancestry import Prunes
from deltachain.chain.chain import Chain
from deltachain.chain.heartbeat import read_heartbeat, write_heartbeat
from deltachain.chain.manifests import NONE
from deltachain.format.keys import manifest_key
from deltachain.maintain import KeepRule, Maintainer, MaintainerThread, Pruner
from deltachain.maintain.survey import Survey
from deltachain.metrics import Figure, MetricsServer, figures, info, phases
from deltachain.publish.config import PublishConfig
from deltachain.store import open_store
from deltachain.threads import Pool, started

if TYPE_CHECKING:
    from deltachain.publish.session import PublishReceipt
    from deltachain.publish.writer import Writer

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 30.0  # seconds from one heartbeat to the next


class NewestRecords:
    """Numbers of the newest tag and prune records, as read or as in the heartbeat before."""

    def __init__(self, writer: Writer) -> None:
        self.tags: dict[str, int] = {}  # by name
        self.prune = NONE
        self._chain = chain = writer.chain
        self._prunes = Prunes(chain.store, chain.identity.chain, chain.trust)
        self._is_begun = False
        self._lost: set[str] = set()

    def look(self) -> None:
        """Read the records that came since the last look; log those that the store lost."""
        if not self._is_begun:
            self._begin()
        listed = tags.numbers(self._chain)
        came = [one for one in listed.items() if one[1] > self.tags.get(one[0], NONE)]
        with Pool(min(tags.READS, len(came))) as pool:
            accepted = pool.map(lambda one: tags.is_accepted(self._chain, *one), came)
            self.tags |= {one[0]: one[1] for one, fine in zip(came, accepted, strict=True) if fine}
        try:
            record = self._prunes.newest_there()
            newest = record.number if record else NONE
        except (errors.FormatError, errors.ObjectNotFoundError, errors.ChainMismatchError):
            newest = self.prune  # unreadable: no change
        lost = {f"tag {n!r}" for n, known in self.tags.items() if known > listed.get(n, NONE)}
        if newest < self.prune:
            lost.add(f"prune record {self.prune}")
        if new := sorted(lost - self._lost):
            logger.warning(
                "%s lost or withholds the newest record of %s%s: readers with trusted keys refuse "
                "the older one",
                self._chain.store.url,
                ", ".join(new[:4]),
                f" and {len(new) - 4} others" if new[4:] else "",
            )
        self._lost, self.prune = lost, max(self.prune, newest)

    def _begin(self) -> None:
        try:
            before = read_heartbeat(self._chain)
        except errors.FormatError as error:  # the next heartbeat replaces it
            logger.warning("the heartbeat of an earlier publisher does not count: %s", error)
            before = None
        if before is not None:
            self.tags, self.prune = dict(before.tags or {}), before.prunes - 1
        self._is_begun = True


class HeartbeatThread:
    """Writes heartbeats on the rank that commits, if the writer has a signing key."""

    def __init__(self, writer: Writer, *, leads: bool, every_s: float = HEARTBEAT_S) -> None:
        self._writer = writer
        self._records = NewestRecords(writer)
        self._every_s = every_s
        self._last = -math.inf  # of the monotonic clock: a time that is set back delays nothing
        self.trouble = ""
        self._stop = Event()
        self._thread = Thread(target=self._run, name="deltachain-heartbeat", daemon=True)
        signs = leads and writer.chain.trust.key is not None
        self._is_started = signs and started(self._thread)
        if signs and not self._is_started:
            logger.warning("no thread can be started for heartbeats of %s", writer.chain.store.url)

    def close(self) -> None:
        self._stop.set()
        if self._is_started:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s / 4):
            try:
                self._beat()
            except Exception as error:  # noqa: BLE001 - the next heartbeat is tried
                if not self.trouble:
                    logger.warning("no heartbeat: %s", error)
                self.trouble = f"no heartbeat: {error.args[0] if error.args else error}"

    def _beat(self) -> None:
        writer, now = self._writer, time.monotonic()
        head, newest = writer.parent, self._records
        if head is None or writer.uncertain or now - self._last < self._every_s:
            return
        newest.look()
        if writer.chain.store.find(manifest_key(head.version + 1)) is not None:
            return  # of a version in flight, or of a publisher that fenced this one
        write_heartbeat(writer.chain, head, now=time.time(), tags=newest.tags, prune=newest.prune)
        self._last, self.trouble = now, ""


PHASES: Final = ("diff", "encode", "upload", "commit")


@dataclass(slots=True)
class PublishTotals:
    commits: int = 0
    failures: int = 0
    nbytes: int = 0
    nnz: int = 0
    diff_s: float = 0.0
    encode_s: float = 0.0
    upload_s: float = 0.0
    commit_s: float = 0.0
    last: PublishReceipt | None = None
    trouble: str = ""  # why the newest version was not committed
    stopped: str = ""  # why the optimizers' steps bring no version

    def fail(self, error: BaseException) -> None:
        self.failures += 1
        self.trouble = str(error.args[0]) if error.args else type(error).__name__

    def count(self, receipt: PublishReceipt) -> None:
        self.last, self.trouble = receipt, ""
        self.commits += 1
        for name in ("nbytes", "nnz", *(f"{phase}_s" for phase in PHASES)):
            setattr(self, name, getattr(self, name) + getattr(receipt, name))


def _publisher_figures(writer: Writer, totals: PublishTotals) -> Iterator[Figure]:
    head, last = writer.parent, totals.last
    version = head.version if head else None
    yield info(engine="publisher", chain=writer.chain.identity.chain)
    yield from figures(
        {
            "version": version,
            "head_version": version,
            "epoch": writer.epoch,
            "commit_timestamp_seconds": head.manifest.time if head else None,
            "changed_ratio": last.density if last else None,
            "commits": totals.commits,
            "failures": totals.failures,
            "published_bytes": totals.nbytes,
            "changed_elements": totals.nnz,
            **{f"{name}_seconds": getattr(totals, f"{name}_s") for name in PHASES},
            "store_requests": writer.chain.store.requests,
        }
    )
    yield from phases(last.phases if last else {})


def background_work(
    writer: Writer, config: PublishConfig, totals: PublishTotals, *, leads: bool
) -> ExitStack:
    """Start the threads of the rank that commits; closing the stack ends them."""
    tenure, heartbeat = writer.tenure, HeartbeatThread(writer, leads=leads)

    def why_unready() -> str:
        doubt = (tenure.lost or tenure.doubt) if tenure is not None else ""
        return doubt or totals.trouble or totals.stopped or heartbeat.trouble

    with ExitStack() as threads:
        if leads and config.maintain:
            maintainer = MaintainerThread(partial(_maintainer_of, writer.chain, config))
            threads.callback(maintainer.close)
        if tenure is not None:
            threads.callback(tenure.close)
        threads.callback(heartbeat.close)
        if leads and config.metrics is not None:
            told = partial(_publisher_figures, writer, totals)
            metrics = MetricsServer(config.metrics, told, why_unready)
            threads.callback(metrics.close)
            logger.info("metrics at %s/metrics", metrics.url)
        return threads.pop_all()


def _maintainer_of(chain: Chain, config: PublishConfig) -> Maintainer:
    store = open_store(config.url, config.storage_options, writer=True)
    own = Chain.open(store, chain.trust)
    rule = config.maintain if isinstance(config.maintain, KeepRule) else KeepRule()
    return Maintainer(
        own, Pruner(Survey(own), rule), base=config.base, anchor_every=config.anchor_every
    )

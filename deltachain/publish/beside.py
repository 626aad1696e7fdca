"""Work beside a publisher, in threads of its own: heartbeats, maintenance and metrics."""

from __future__ import annotations

import logging
from functools import partial

from deltachain.chain.chain import Chain
from deltachain.errors import ConfigError
from deltachain.maintain import KeepRule, Maintainer, MaintainerThread, Pruner
from deltachain.maintain.survey import Survey
from deltachain.metrics import MetricsServer
from deltachain.publish.config import PublishConfig
from deltachain.publish.figures import PublishTotals, publisher_figures
from deltachain.publish.heartbeat_thread import HeartbeatThread
from deltachain.publish.writer import Writer
from deltachain.store import open_store

logger = logging.getLogger(__name__)


class BackgroundWork:
    """Threads of the rank that commits; other ranks have none.

    Args:
        writer: Writer of the chain.
        config: Settings of the publisher.
        totals: Totals of the publisher.
        leads: Whether this rank commits.

    Raises:
        ConfigError: The address for metrics cannot be bound.
    """

    def __init__(
        self, writer: Writer, config: PublishConfig, totals: PublishTotals, *, leads: bool
    ) -> None:
        self._totals, self._tenure = totals, writer.tenure
        self._heartbeat = HeartbeatThread(writer, leads=leads)
        self._metrics: MetricsServer | None = None
        if leads and config.metrics is not None:
            figures = partial(publisher_figures, writer, totals)
            try:
                self._metrics = MetricsServer(config.metrics, figures, self.why_unready)
            except ConfigError:
                self._heartbeat.close()
                raise
            logger.info("metrics at %s/metrics", self._metrics.url)
        self._maintainer: MaintainerThread | None = None
        if leads and config.maintain:
            self._maintainer = MaintainerThread(partial(maintainer_of, writer.chain, config))

    def why_unready(self) -> str:
        """Return why the publisher does not do its work; empty if it does."""
        tenure = self._tenure
        if tenure is not None and (tenure.lost or tenure.doubt):
            return tenure.lost or tenure.doubt
        return self._totals.trouble or self._totals.stopped or self._heartbeat.trouble

    def close(self) -> None:
        """End the threads; may be called again."""
        if self._metrics is not None:
            self._metrics.close()
        self._heartbeat.close()
        if self._tenure is not None:
            self._tenure.close()
        if self._maintainer is not None:
            self._maintainer.close()


def maintainer_of(chain: Chain, config: PublishConfig) -> Maintainer:
    """Return a maintainer of a publisher's chain, with a store of its own.

    Raises:
        StoreError: The store cannot be opened.
    """
    store = open_store(config.url, config.storage_options, writer=True)
    own = Chain.open(store, chain.trust)
    rule = config.maintain if isinstance(config.maintain, KeepRule) else KeepRule()
    return Maintainer(
        own, Pruner(Survey(own), rule), base=config.base, anchor_every=config.anchor_every
    )

"""A replica that is cut off from its S3 server, seen by a real Prometheus and by the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltachain.control.replica_client import ReplicaClient
from deltachain.dashboard.app import create_app
from deltachain.dashboard.chain_index import ChainIndex
from deltachain.dashboard.watcher import Watcher
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.status import HealthLimits
from deltachain.store import Store, open_store
from deltachain.subscribe import SubscribeConfig
from tests.e2e.pages import opened
from tests.e2e.prometheus import PROMETHEUS, Prometheus, prometheus
from tests.support.models import train_
from tests.support.proxy import Proxy
from tests.support.ranks import FakeEngine
from tests.support.seaweed import Seaweed
from tests.support.sharding import Sharding, save, trained
from tests.unit.control.replicas import app_of, served
from tests.unit.replica.replicas import eventually

TOKEN = "one that nobody guesses"  # noqa: S105
SILENCE_S = 2.0
ALERTS = {("ReplicaNotReady", "firing"), ("StoreSilent", "firing")}

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus: make prometheus")


@dataclass(frozen=True)
class Scene:
    publish: Callable[[], int]
    link: Proxy
    leader: Leader
    client: ReplicaClient
    prometheus: Prometheus
    store: Store

    def cut_off(self) -> None:
        self.link.refuse()
        self.publish()
        eventually(lambda: not self.client.ready().ready)


@pytest.fixture
def scene(tmp_path: Path, seaweed: Seaweed, s3_url: Callable[[], str]) -> Iterator[Scene]:
    url, shape = s3_url(), Sharding(tp=2)
    model = trained(shape)
    with ExitStack() as stack:
        link = stack.enter_context(Proxy(seaweed.port))
        store = open_store(url, seaweed.options)
        far = open_store(url, {**seaweed.options, "endpoint_url": link.endpoint})
        for one in (store, far):
            stack.callback(one.close)
        publisher = Publisher(PublishConfig(url=url), store=store).attach(model)
        stack.enter_context(publisher)
        settings = ReplicaSettings(
            subscribe=SubscribeConfig(url=url, poll_s=0.05),
            spool=tmp_path / "spool",
            follow=True,
            max_silence_s=SILENCE_S,
        )
        engine = FakeEngine(shape, save(model, tmp_path / "model"), settings.spool)
        leader = Leader(settings, engine, store=far)
        stack.callback(leader.stop)
        leader.start()
        address = stack.enter_context(served(app_of(leader, token=TOKEN)))
        client = stack.enter_context(ReplicaClient(address, token=TOKEN, timeout_s=5))
        seeds = iter(range(1, 1000))

        def publish() -> int:
            train_(model, next(seeds), share=0.05)
            return publisher.publish().result().version

        first = publish()
        eventually(lambda: client.status().version == first)
        replicas = [address.removeprefix("http://")]
        server = prometheus(tmp_path / "prometheus", replicas, TOKEN, silence_s=SILENCE_S)
        watching = stack.enter_context(server)
        yield Scene(publish, link, leader, client, watching, store)


def test_prometheus_fires_while_a_replica_is_cut_off_from_its_store(scene: Scene) -> None:
    watching = scene.prometheus
    eventually(lambda: watching.health() == ["up"])
    assert watching.alerts() == set()

    scene.cut_off()
    eventually(lambda: watching.alerts() >= ALERTS)
    assert "is not ready" in watching.summary("ReplicaNotReady")
    assert "has not reached its store for" in watching.summary("StoreSilent")

    scene.link.reset()
    eventually(lambda: watching.alerts() == set())
    assert scene.client.ready().ready


@pytest.mark.browser
def test_prometheus_and_the_dashboard_agree_on_a_replica_that_is_cut_off(
    browser: Any, scene: Scene, tmp_path: Path
) -> None:
    limits = HealthLimits(lag=0, silence_s=SILENCE_S)
    client = ReplicaClient(scene.client.url, token=TOKEN, timeout_s=5)
    index = ChainIndex(scene.store)
    with (
        Watcher(index, [client], poll_s=0.1, asked_s=0.1, limits=limits) as watcher,
        served(create_app(watcher)) as url,
        opened(browser, url, viewport={"width": 1400, "height": 1000}) as page,
    ):
        page.get_by_text("No alerts").wait_for()
        page.get_by_role("button", name="Pick version 1", exact=True).click()
        page.get_by_text("Held by 1 of 1 replica").wait_for()
        page.locator("#phase-table").get_by_text("swap, a part of pause").wait_for()

        scene.cut_off()
        eventually(lambda: scene.prometheus.alerts() >= ALERTS)
        for kind in ("cut off", "not ready", "behind"):
            page.locator(f'#alert-list [data-kind="{kind}"]').wait_for()
        page.screenshot(path=tmp_path / "cut_off.png", full_page=True)

        scene.link.reset()
        eventually(lambda: scene.prometheus.alerts() == set())
        page.get_by_text("No alerts").wait_for()

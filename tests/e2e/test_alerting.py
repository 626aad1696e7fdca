"""A replica that is cut off from its S3 server, seen by a real Prometheus and by the dashboard."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from deltachain.control.replica_client import ReplicaClient
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.status import HealthLimits
from deltachain.store import Store, open_store
from deltachain.subscribe import SubscribeConfig
from examples.demo.online.processes import free_port
from spaces.dashboard.app import create_app
from spaces.dashboard.chain_index import ChainIndex
from spaces.dashboard.watcher import Watcher
from tests.e2e.pages import opened
from tests.support.engine import FakeEngine, Sharding, save, trained
from tests.support.models import train_
from tests.support.proxy import Proxy
from tests.support.seaweed import Seaweed
from tests.support.values import eventually
from tests.unit.control.replicas import app_of, served
from tests.unit.deploy.recipes import DEPLOY, TOOLS, load

FOLDER: Final = DEPLOY / "prometheus"
PROMETHEUS: Final = shutil.which("prometheus") or shutil.which("prometheus", path=str(TOOLS))

EVERY: Final = "200ms"

PATIENCE_S: Final = 60.0


@dataclass(frozen=True)
class Prometheus:
    url: str

    def alerts(self) -> set[tuple[str, str]]:
        found = self._get("alerts")["alerts"]
        return {(alert["labels"]["alertname"], alert["state"]) for alert in found}

    def summary(self, name: str) -> str:
        (found,) = [a for a in self._get("alerts")["alerts"] if a["labels"]["alertname"] == name]
        said: str = found["annotations"]["summary"]
        return said

    def health(self) -> list[str]:
        return [target["health"] for target in self._get("targets")["activeTargets"]]

    def _get(self, what: str) -> Mapping[str, Any]:
        answer = httpx.get(f"{self.url}/api/v1/{what}", trust_env=False, timeout=PATIENCE_S)
        answer.raise_for_status()
        found: Mapping[str, Any] = answer.json()["data"]
        return found


@contextmanager
def prometheus(
    folder: Path, replicas: Sequence[str], token: str, *, silence_s: float
) -> Iterator[Prometheus]:
    """A server that scrapes replicas as the recipe does."""
    assert PROMETHEUS is not None
    folder.mkdir()
    (folder / "token").write_text(token, encoding="utf-8")
    (folder / "alerts.yml").write_text(yaml.dump(_hurried(silence_s)), encoding="utf-8")
    (folder / "prometheus.yml").write_text(yaml.dump(_config(folder, replicas)), encoding="utf-8")
    url = f"127.0.0.1:{free_port()}"
    words = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={url}",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            _wait(process, f"http://{url}/-/ready", folder / "log")
            yield Prometheus(f"http://{url}")
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _hurried(silence_s: float) -> Mapping[str, Any]:
    """The rules of the recipe with shorter times."""
    found: dict[str, Any] = load(FOLDER / "alerts.yml")
    for rule in found["groups"][0]["rules"]:
        if "for" in rule:
            rule["for"] = "1s"
        if rule["alert"] == "StoreSilent":
            assert rule["expr"].startswith("deltachain_silence_seconds > 60 ")
            rule["expr"] = rule["expr"].replace("60", str(silence_s), 1)
    return found


def _config(folder: Path, replicas: Sequence[str]) -> Mapping[str, Any]:
    """The configuration of the recipe for other machines: replicas alone, scraped more often."""
    found: dict[str, Any] = load(FOLDER / "prometheus.yml")
    found["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout"), EVERY) | {
        "evaluation_interval": EVERY
    }
    found["rule_files"] = [str(folder / name) for name in found["rule_files"]]
    jobs = [job for job in found["scrape_configs"] if job["job_name"] == "replicas"]
    jobs[0]["authorization"]["credentials_file"] = str(folder / "token")
    jobs[0]["static_configs"] = [{"targets": list(replicas)}]
    return found | {"scrape_configs": jobs}


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    limit = time.monotonic() + PATIENCE_S
    while True:
        try:
            if httpx.get(url, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass  # not yet
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.05)


TOKEN = "one that nobody guesses"  # noqa: S105
SILENCE_S = 2.0
ALERTS = {("ReplicaNotReady", "firing"), ("StoreSilent", "firing")}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus: make prometheus"),
]


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

"""The dashboard in a real browser: Chromium, without a window, beside replicas over HTTP."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.control.replica_client import ReplicaClient
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.leader import Leader
from deltachain.status import HealthLimits
from spaces.dashboard.app import create_app
from spaces.dashboard.chain_index import ChainIndex
from spaces.dashboard.watcher import Watcher
from tests.e2e.pages import opened
from tests.support.engine import Sharding
from tests.support.values import eventually
from tests.unit.control.replicas import app_of, served
from tests.unit.replica.replicas import Followed, led

HOSTILE = '<img src="x" onerror="document.title=1">'
TOKEN = "one that nobody guesses"  # noqa: S105

pytestmark = pytest.mark.browser


@dataclass(frozen=True)
class Replica:
    here: Followed
    leader: Leader
    url: str


@contextmanager
def replica(folder: Path, chain: Followed | None = None) -> Iterator[Replica]:
    here = Followed(Sharding(tp=2), folder)
    if chain is not None:  # another engine of the same chain
        here.faulty.inner = chain.store
    with (
        led(here, follow=True, max_silence_s=0.5) as leader,
        served(app_of(leader, is_open=True)) as url,
    ):
        leader.start()
        yield Replica(here, leader, url)
    here.close()


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Replica]:
    with replica(tmp_path / "first") as made:
        made.here.publish(1, 2)
        eventually(lambda: made.leader.status().version == 2)
        yield made


@pytest.fixture
def page(browser: Any, first: Replica, tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:
        second = stack.enter_context(replica(tmp_path / "second", first.here))
        eventually(lambda: second.leader.status().version == 2)
        clients = [ReplicaClient(one.url, timeout_s=5) for one in (first, second)]
        index = ChainIndex(first.here.store)
        limits = HealthLimits(lag=1, silence_s=0.5)
        watcher = Watcher(index, clients, poll_s=0.05, asked_s=0.05, limits=limits)
        stack.enter_context(watcher)
        url = stack.enter_context(served(create_app(watcher)))
        yield stack.enter_context(opened(browser, url))


def test_a_version_is_picked_and_a_replica_that_is_cut_off_is_an_alert(
    page: Any, first: Replica
) -> None:
    page.get_by_text("No alerts").wait_for()
    page.get_by_role("button", name="Pick version 2", exact=True).click()
    page.get_by_text("Held by 2 of 2 replicas").wait_for()
    phases = page.locator("#phase-table")
    phases.get_by_text("2 replicas").first.wait_for()
    names = [text.partition(",")[0] for text in phases.locator("tbody th").all_inner_texts()]
    assert names == ["diff", "encode", "upload", "look", "fetch", "stage", "pause", "swap"]

    first.here.faulty.down = True
    first.here.publish(3, 4)  # which the other one follows
    cut = f'#alert-list [data-engine="{first.url}"]'
    page.locator(f'{cut}[data-kind="cut off"]').wait_for()
    page.locator(f'{cut}[data-kind="not ready"]').wait_for()
    page.locator(f'{cut}[data-kind="behind"]').wait_for()
    page.get_by_text("Held by 1 of 2 replicas").wait_for()
    row = page.locator(f'#fleet-table tr[data-engine="{first.url}"]')
    assert "cut off" in row.inner_text()
    assert page.locator("#fleet-table tbody tr").first.get_attribute("data-engine") == first.url
    page.get_by_role("button", name="Pick version 4", exact=True).wait_for()

    first.here.faulty.down = False
    page.get_by_text("No alerts").wait_for()
    page.get_by_text("Held by 0 of 2 replicas").wait_for()


def test_texts_of_a_chain_are_never_html(page: Any, first: Replica) -> None:
    chain = Chain.open(first.here.store)
    tags.set_(chain, "best", chain.read(1), time=0.0)
    config = PublishConfig(url=first.here.store.url, metadata={HOSTILE: HOSTILE})
    Publisher(config, store=first.here.store).attach(first.here.model).close()
    page.get_by_role("button", name="Pick version 3", exact=True).click()
    page.locator("#picked dt", has_text=HOSTILE).wait_for()
    assert page.locator("#main img").count() == 0
    assert page.title() != "1"


def test_everything_is_reached_by_keyboard_and_named(page: Any) -> None:
    page.get_by_role("button", name="Pick version 2", exact=True).wait_for()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.trim()"))
        name = page.evaluate(
            "(e => e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent || "
            "document.getElementById(e.getAttribute('aria-labelledby'))?.textContent)"
            "(document.activeElement)"
        )
        assert name.strip()
    assert {"Skip to alerts", "Show", "All", "2", "1", "Pick"} <= reached
    for chart in ("density", "bytes", "track"):
        label = page.locator(f"#{chart}-chart").get_attribute("aria-label")
        assert "table" in label
    assert page.locator("[role=img]:not([aria-label])").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_a_page_fits_its_window(browser: Any, first: Replica, width: int, scheme: str) -> None:
    with (
        Watcher(ChainIndex(first.here.store), [], poll_s=0.05) as watcher,
        served(create_app(watcher)) as url,
        opened(browser, url, viewport={"width": width, "height": 800}, color_scheme=scheme) as page,
    ):
        page.get_by_role("button", name="Pick version 2", exact=True).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 22, 28)"}[scheme]


def test_a_token_is_asked_for(browser: Any, first: Replica) -> None:
    with (
        Watcher(ChainIndex(first.here.store), [], poll_s=0.05) as watcher,
        served(create_app(watcher, token=TOKEN)) as url,
    ):
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        page.get_by_label("Token of this dashboard").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("wrong token").wait_for()
        assert not page.locator("#main").is_visible()
        page.get_by_label("Token of this dashboard").fill(TOKEN)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Pick version 2", exact=True).wait_for()
        context.close()


def test_a_token_in_the_address_is_taken_and_hidden(browser: Any, first: Replica) -> None:
    with (
        Watcher(ChainIndex(first.here.store), [], poll_s=0.05) as watcher,
        served(create_app(watcher, token=TOKEN)) as url,
        opened(browser, f"{url}/#{urlencode({'token': TOKEN})}") as page,
    ):
        page.get_by_role("button", name="Pick version 2", exact=True).wait_for()
        assert page.url == f"{url}/"
        page.reload()
        page.get_by_role("button", name="Pick version 2", exact=True).wait_for()

"""What a publisher shows to Prometheus."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deltachain.errors import ConfigError, DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from tests.support.faults import FaultyStore
from tests.support.models import TinyModel, train_

Attach = Callable[..., Publisher]


def scraped(url: str) -> dict[str, float]:
    """Value of every metric; phases by their names."""
    text = httpx.get(url).text
    return {
        one.labels.get("phase", one.name): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_publisher_serves_its_figures_until_it_closes(
    store: MemoryStore, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model, faulty = TinyModel(), FaultyStore(store)
    publisher = attach(model, faulty, metrics="0", on_error="warn")
    url = re.findall(r"metrics at (\S+)", caplog.text)[0]
    assert scraped(url)["deltachain_version"] == 0
    train_(model, 1)
    publisher.publish(step=1)
    receipt = publisher.flush()
    assert receipt is not None
    found = scraped(url)
    assert (found["deltachain_version"], found["deltachain_commits_total"]) == (1, 1)
    assert found["deltachain_published_bytes_total"] == receipt.nbytes
    assert found["diff"] == receipt.diff_s > 0
    assert 0 < found["upload"] <= found["encode"] == receipt.encode_s
    faulty.down = True
    train_(model, 2)
    publisher.publish(step=2)
    publisher.flush()
    assert scraped(url)["deltachain_failures_total"] >= 1
    answer = httpx.get(url.replace("/metrics", "/readyz"))
    assert (answer.status_code, "not ready: " in answer.text) == (503, True)
    faulty.down = False
    train_(model, 3)
    publisher.publish(step=3)
    publisher.flush()
    assert httpx.get(url.replace("/metrics", "/readyz")).text == "ready\n"
    publisher.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_taken_port_is_an_error_before_training_starts(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    attach(TinyModel(), metrics="0")
    port = re.findall(r"metrics at \S+:(\d+)/", caplog.text)[0]
    with pytest.raises(DeltaChainError, match=f"cannot be served at .*:{port}"):
        attach(TinyModel(), MemoryStore(), metrics=port)


def test_an_invalid_address_is_an_error_at_once() -> None:
    with pytest.raises(ConfigError, match="no address to serve at"):
        PublishConfig(url="memory://x", metrics="localhost")

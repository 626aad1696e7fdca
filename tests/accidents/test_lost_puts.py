"""A put that was lost behind a 200, on a real S3 server with a liar before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from deltachain.errors import DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import Subscriber
from tests.accidents.liar import Liar
from tests.support.models import bits_of, plain_model, replica_of, same, train_
from tests.support.seaweed import Seaweed
from tests.unit.cli.support import invoke

ETAG = {"ETag": '"0123456789abcdef0123456789abcdef"'}


@pytest.fixture
def liar(seaweed: Seaweed) -> Iterator[Liar]:
    with Liar(seaweed.port) as made:
        yield made


def train(url: str, options: dict[str, str], model: nn.Module, liar: Liar, lost: str) -> None:
    config = PublishConfig(url=url, on_error="warn", anchor_every=8)
    at_once = lost in ("chain.json", "table.json", "anchors/")
    liar.lies = [lost] if at_once and not liar.lost else []
    with Publisher(config, store=open_store(url, options, writer=True)) as publisher:
        publisher.attach(model)
        for step in range(1, 25):
            if step == 3 and not at_once and not liar.lost:
                liar.lies = [lost]
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()


@pytest.mark.slow
@pytest.mark.parametrize("headers", [{}, ETAG], ids=["no-etag", "false-etag"])
@pytest.mark.parametrize("lost", ["chain.json", "table.json", "manifests/", "deltas/", "anchors/"])
def test_a_put_lost_behind_a_200(
    seaweed: Seaweed,
    liar: Liar,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
    headers: dict[str, str],
) -> None:
    for name, value in seaweed.env().items():
        monkeypatch.setenv(name, value)
    url = seaweed.url(f"liar/{tmp_path.name}")
    options = {**seaweed.options, "endpoint_url": liar.endpoint}
    model, said = plain_model(), []
    liar.headers = headers
    for _ in range(3):  # a trainer that failed is started again
        try:
            train(url, options, model, liar, lost)
            break
        except DeltaChainError as exc:
            said.append(str(exc))
    assert liar.lost
    for kind in ("dict", "folder"):
        replica = replica_of(model, kind, tmp_path / kind)
        with Subscriber(url, replica.target) as subscriber:
            subscriber.update()
        assert same(replica.bits(), bits_of(model))
    done = invoke("verify", url)
    assert done.code == 0, (done.stderr, said)

"""A mirror that is killed, at any moment, and what the next start makes of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from deltachain.format.documents import EdgeRecord, Manifest, unseal
from deltachain.format.keys import MIRROR_KEY, PUBLISHER_KEY
from deltachain.mirror import Mirror
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import Subscriber
from tests.crash.places import Place, contents
from tests.support.models import TinyModel, bits_of, recompute, same, tensors_of, train_

KILLS = 10


def publish(url: str) -> TinyModel:
    model = TinyModel()
    config = PublishConfig(url=url, part_nbytes=64, anchor_every=2)
    with Publisher(config).attach(model, assets={"config.json": b"{}"}) as publisher:
        for step in range(1, 13):
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()
    return model


def arrived(place: Place, url: str) -> dict[str, bytes]:
    """Every object of a mirror whose writers were killed."""
    return {key: data for key, data in contents(url).items() if data or place.kind != "s3"}


def check_whole(found: dict[str, bytes]) -> None:
    for key, data in found.items():
        if key.startswith("manifests/"):
            parts = unseal(data, Manifest, key=key).edge.parts
        elif key.startswith("edges/"):
            parts = unseal(data, EdgeRecord, key=key).edge.parts
        else:
            continue
        for part in parts:
            assert len(found[part.key]) == part.nbytes, f"{key} names {part.key}"


def test_a_mirror_that_is_killed_ten_times_is_byte_identical(
    place: Place, killed: Callable[..., None], tmp_path: Path
) -> None:
    url, there = str(tmp_path / "source"), place.url("mirror")
    model, source = publish(url), contents(url)
    del source[PUBLISHER_KEY]  # where a publisher is at work, not what it published
    for count in range(KILLS):
        do = "kill-after" if count % 2 else "kill"
        killed(role="mirror", url=url, destination=there, do=do, nth=3 + count % 4 * 3)
        found = arrived(place, there)
        assert found.keys() - source.keys() <= {MIRROR_KEY}
        copied = {key: data for key, data in found.items() if key != MIRROR_KEY}
        assert copied == {key: source[key] for key in copied}
        check_whole(found)
    with closing(open_store(url)) as one, closing(open_store(there, writer=True)) as two:
        before = arrived(place, there)
        new = sum(receipt.objects for receipt in Mirror(one, two).catch_up())
        found = contents(there)
        assert new <= len(found) - len(before)
        assert list(Mirror(one, two).catch_up()) == []
        recompute(two)
    found.pop(MIRROR_KEY)
    assert found == source
    tensors = tensors_of(model)
    with Subscriber(there, tensors) as subscriber:
        subscriber.update()
    assert same(bits_of(tensors), bits_of(model))

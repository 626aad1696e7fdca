"""Mirrors between stores of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deltachain.format.keys import CHAIN_KEY, MIRROR_KEY, TABLE_KEY
from deltachain.mirror import Mirror
from deltachain.mirror.mirror import LOOK_BACK
from deltachain.store import Store, open_store
from deltachain.subscribe import Subscriber
from tests.support.hub.server import HubServer
from tests.support.models import TinyModel, bits_of, recompute, same, tensors_of
from tests.support.seaweed import Seaweed
from tests.unit.mirror.conftest import Pair, copy_of


def check(first: Store, last: Store, model: TinyModel) -> None:
    """Check that two stores have the same objects, and the bits of a model."""
    found, expected = copy_of(last), copy_of(first)
    found.pop(MIRROR_KEY)
    expected.pop(MIRROR_KEY, None)
    assert found == expected
    recompute(last)
    tensors = tensors_of(model)
    Subscriber("memory://unused", tensors, store=last).update()
    assert same(bits_of(tensors), bits_of(model))


def test_from_a_folder_to_s3_and_back(
    pair: Pair, seaweed: Seaweed, s3_url: Callable[[], str], tmp_path: Path
) -> None:
    folder, back = open_store(tmp_path / "one"), open_store(tmp_path / "two")
    there = open_store(s3_url(), seaweed.options, writer=True)
    pair.grow(5, to=folder)
    for source, destination in ((folder, there), (there, back)):
        mirror = Mirror(source, destination)
        list(mirror.catch_up())
        pair.grow(2, to=folder)
        list(Mirror(folder, there).catch_up())
        list(mirror.catch_up())
        check(source, destination, pair.model)
    there.close()


@pytest.mark.parametrize("with_keys", [False, True])
def test_to_a_bucket_of_the_hub_and_back(
    pair: Pair, hub: HubServer, bucket: str, tmp_path: Path, *, with_keys: bool
) -> None:
    hub.configure(calls=1_000_000)
    options = {"endpoint": hub.url, "token": hub.token, "calls": 1_000_000}
    if with_keys:
        options["s3_endpoint"] = f"{hub.url}/s3/{bucket.partition('/')[0]}"
        options |= {"s3_key": hub.s3_key, "s3_secret": hub.s3_secret}
    there = open_store(f"hf://buckets/{bucket}/run/1", options, writer=True)
    folder, back = open_store(tmp_path / "one"), open_store(tmp_path / "two")
    pair.grow(5, to=folder)
    mirror = Mirror(folder, there)
    list(mirror.catch_up())
    pair.grow(3, to=folder)
    list(mirror.catch_up())
    check(folder, there, pair.model)
    assert list(Mirror(folder, there).catch_up()) == []
    list(Mirror(there, back).catch_up())
    check(there, back, pair.model)
    there.close()


@pytest.mark.parametrize("key", [CHAIN_KEY, TABLE_KEY])
def test_a_mirror_that_follows_restores_a_lost_identity_within_a_look_back(
    pair: Pair, key: str
) -> None:
    pair.grow(1)
    mirror = pair.mirror()
    list(mirror.catch_up())
    pair.there.delete(key)
    for _ in range(LOOK_BACK):
        list(mirror.catch_up())
    assert pair.there.get(key) == pair.source.get(key)

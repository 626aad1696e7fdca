"""Mirrors that are given trusted keys: nothing past a forgery is copied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.chain.trust import Trust
from deltachain.errors import DeltaChainError, ForkedChainError, SignatureError
from deltachain.format.documents import PruneRecord, Tag
from deltachain.format.keys import MIRROR_KEY, manifest_key, prune_key, tag_key, version_of
from deltachain.mirror import Mirror
from deltachain.store import MemoryStore
from tests.hostile.signed import (
    MALLORY,
    NOBODY,
    OWNER,
    Author,
    Follower,
    edit,
    objects,
    signature_place,
    trust_of,
)

SIGNED_AT = 3
READER = trust_of(1)


def mirrored(source: MemoryStore, there: MemoryStore) -> dict[str, bytes]:
    list(Mirror(source, there, trust=READER).catch_up())
    found = objects(there)
    found.pop(MIRROR_KEY)
    return found


def relink(store: MemoryStore) -> None:
    """Publish another history from a version on, as somebody who controls the store."""
    evil = Author(MALLORY, evil=1).grow(6)
    for key, data in objects(evil.store).items():
        if (version_of(key) or 0) >= SIGNED_AT:
            store.put(key, data)


NEWEST = "another history by another key"
SIGNED_FORGERIES: dict[str, tuple[Callable[[MemoryStore], object], type[DeltaChainError]]] = {
    "a manifest without its signature, its successors as they were": (
        lambda store: edit(store, manifest_key(SIGNED_AT), lambda p: p.update(step=9), keeps=False),
        SignatureError,
    ),
    "a changed manifest with the signature of another": (
        lambda store: edit(store, manifest_key(SIGNED_AT), lambda p: p.update(step=9), keeps=True),
        SignatureError,
    ),
    NEWEST: (relink, DeltaChainError),
}


@pytest.mark.parametrize("what", SIGNED_FORGERIES)
def test_nothing_past_a_forgery_is_copied_with_keys(what: str) -> None:
    source, there = Author(OWNER).grow(6).store, MemoryStore()
    true = objects(source)
    act, error = SIGNED_FORGERIES[what]
    act(source)
    for _ in range(2):
        with pytest.raises(error):
            mirrored(source, there)
    found = objects(there)
    found.pop(MIRROR_KEY)
    assert (manifest_key(SIGNED_AT - 1) in found) is (
        what != NEWEST
    )  # a forged head ends it at once
    assert all(true[key] == data for key, data in found.items())
    assert not any((version_of(key) or 0) >= SIGNED_AT for key in found)
    for key, data in true.items():
        source.put(key, data)
    assert mirrored(source, there) == true


def test_a_history_that_was_hashed_and_linked_again_is_refused() -> None:
    source, there = Author(OWNER).grow(6).store, MemoryStore()
    parent = ""
    for version in range(6):
        key = manifest_key(version)
        if version >= SIGNED_AT:
            edit(source, key, partial(dict.update, step=99, parent=parent), keeps=True)
        parent = Chain.open(source, NOBODY).read(version).digest
    with pytest.raises(SignatureError, match=r"manifests/0*5"):
        mirrored(source, there)
    assert not any((version_of(key) or 0) >= SIGNED_AT for key in objects(there))


def test_a_running_mirror_copies_nothing_of_another_history() -> None:
    author, there = Author(OWNER).grow(SIGNED_AT), MemoryStore()
    mirror = Mirror(author.store, there, trust=READER)
    list(mirror.catch_up())
    author.grow(1)
    relink(author.store)
    for _ in range(10):
        with pytest.raises((SignatureError, ForkedChainError)):
            list(mirror.catch_up())
    assert not any((version_of(key) or 0) >= SIGNED_AT for key in objects(there))


def test_an_unsigned_identity_is_not_copied() -> None:
    source, there = Author(NOBODY).grow(2).store, MemoryStore()
    with pytest.raises(SignatureError):
        mirrored(source, there)
    assert objects(there) == {}


def test_signing_that_begins_later_is_copied_and_counts_for_versions_before() -> None:
    author, there = Author(NOBODY).grow(3), MemoryStore()
    source = author.store
    early = Mirror(source, there, trust=NOBODY)
    list(early.catch_up())
    source.put_if_absent(*next(iter(Chain.open(source, OWNER.unchecked()).sign_identity().items())))
    author.chain = Chain.open(source, OWNER)
    author.grow(2)
    list(early.catch_up())
    assert signature_place(1) in objects(there)
    again = MemoryStore()
    assert mirrored(source, again) == objects(source)
    follower = Follower(again, 1)
    follower.subscriber.update()
    assert follower.subscriber.version == 4


@pytest.mark.parametrize(("trust", "crosses"), [(OWNER, True), (MALLORY, False), (NOBODY, False)])
def test_tags_and_prune_records_cross_if_a_trusted_key_signed_them(
    trust: Trust, crosses: bool
) -> None:
    source, there = Author(OWNER).grow(4).store, MemoryStore()
    record = PruneRecord(chain=f"{7:032x}", number=0, head=3, maintainer="m", time=1.0)
    tagged = Chain.open(source, NOBODY).read(2)
    tag = Tag(
        chain=f"{7:032x}",
        name="best",
        number=0,
        version=2,
        state=tagged.manifest.state,
        manifest=tagged.digest,
        time=1.0,
    )
    source.put(prune_key(0), trust.seal(record, f"{7:032x}"))
    source.put(tag_key("best", 0), trust.seal(tag, f"{7:032x}"))
    found = mirrored(source, there)
    assert (prune_key(0) in found) is (tag_key("best", 0) in found) is crosses
    assert manifest_key(3) in found


def test_tags_follow_their_versions() -> None:
    author, there = Author(OWNER).grow(3), MemoryStore()
    source, chain = author.store, author.chain
    mirror = Mirror(source, there, trust=READER)
    list(mirror.catch_up())
    author.grow(1)
    tags.set_(chain, "best", chain.read(1), time=1.0)
    tags.set_(chain, "best", chain.read(3), time=2.0)
    list(mirror.catch_up())
    found = objects(there)
    found.pop(MIRROR_KEY)
    assert found == objects(source)
    tags.remove(chain, "best", time=3.0)
    for _ in range(8):
        list(mirror.catch_up())
    assert tag_key("best", 2) in objects(there)


def test_a_fork_is_named_without_keys_too() -> None:
    source, there = Author(OWNER).grow(6).store, MemoryStore()
    edit(source, manifest_key(SIGNED_AT), lambda p: p.update(step=9), keeps=False)
    with pytest.raises(ForkedChainError):
        list(Mirror(source, there, trust=NOBODY).catch_up())

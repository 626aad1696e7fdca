"""The store is the attacker: whatever it shows, only what a trusted key signed is applied."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deltachain import errors
from deltachain.chain.chain import Chain
from deltachain.chain.trust import Trust
from deltachain.format import keys
from deltachain.format.documents import Head, dump
from deltachain.store import MemoryStore
from tests.format.forge import dumps
from tests.hostile.signed import (
    MALLORY,
    NOBODY,
    OWNER,
    Author,
    Follower,
    bits_of,
    edit,
    key_of,
    resign,
    signature_place,
    signatures_of,
    trust_of,
)
from tests.support.backup import objects_of, put_back

Attack = Callable[[MemoryStore], object]
HEAD = 3


MANIFEST = keys.manifest_key(HEAD)


def forged(trust: Trust, **settings: Any) -> MemoryStore:
    return Author(trust, **{"evil": 1} | settings).grow(HEAD + 1).store


def forged_versions(store: MemoryStore, other: MemoryStore) -> None:
    for key, data in objects_of(other).items():
        if key not in (keys.CHAIN_KEY, keys.TABLE_KEY) and not key.startswith(
            ("assets/", "signatures/")
        ):
            store.put(key, data)


def head_signed(signatures: Callable[[MemoryStore, Any], Any], **payload: object) -> Attack:
    """The head has other signatures, made from the true one; its payload may be changed."""

    def act(store: MemoryStore) -> None:
        (true,) = signatures_of(store, MANIFEST)
        edit(store, MANIFEST, lambda d: d.update(payload), keeps=False)
        resign(store, MANIFEST, signatures(store, true))

    return act


def other_identity(**fields: object) -> Attack:
    return lambda store: store.put(
        keys.CHAIN_KEY, dumps(json.loads(store.get(keys.CHAIN_KEY)) | fields)
    )


def other_signature(other: MemoryStore, place: str) -> Attack:
    """The identity has a signature that belongs elsewhere."""
    return lambda store: store.put(signature_place(1), other.get(place))


def other_chain(store: MemoryStore) -> None:
    forged_versions(store, forged(OWNER, chain_id="b" * 32))


def renamed_chain(store: MemoryStore) -> None:
    """They say that they are of this chain."""
    other_chain(store)
    for version in range(HEAD + 1):
        edit(store, keys.manifest_key(version), lambda d: d.update(chain=f"{7:032x}"), keeps=True)


def rehash(*, keeps: bool) -> Attack:
    def act(store: MemoryStore) -> None:
        other = forged(NOBODY)
        part = json.loads(other.get(MANIFEST))["payload"]["edge"]["parts"][0]
        store.put(part["key"], other.get(part["key"]))
        edit(store, MANIFEST, lambda d: d["edge"].update(parts=[part]), keeps=keeps)

    return act


OF_ANOTHER = "versions of another chain of the owner"

NEWCOMER: dict[str, Attack] = {
    "other weights, hashed again": rehash(keeps=False),
    "other weights under the true signature": rehash(keeps=True),
    "the head without its signature": head_signed(lambda *_: []),
    "swapped signatures": head_signed(
        lambda store, _: signatures_of(store, keys.manifest_key(2)), nnz=0
    ),
    "the signature of an edge record": head_signed(
        lambda store, _: signatures_of(store, keys.edge_key(1, "anchor", None))
    ),
    "a thousand false signatures": head_signed(lambda _, true: [true] * 1000, nnz=0),
    "another algorithm": head_signed(lambda _, true: [true | {"algorithm": "none"}]),
    "an empty signature": head_signed(lambda _, true: [true | {"value": ""}]),
    "a signature of zeros": head_signed(lambda _, true: [true | {"value": "0" * 128}]),
    "a signature in capitals": head_signed(lambda _, true: [true | {"value": "A" * 128}]),
    "all versions linked anew": lambda s: forged_versions(s, forged(NOBODY)),
    "all versions signed by another": lambda s: forged_versions(s, forged(MALLORY)),
    "another chain of nobody": lambda s: put_back(s, objects_of(forged(NOBODY))),
    "another chain of another": lambda s: put_back(s, objects_of(forged(MALLORY))),
    OF_ANOTHER: other_chain,
    "these under this chain's name": renamed_chain,
    "an identity with another table": other_identity(table="0" * 64),
    "an identity without files": other_identity(assets=[]),
    "an identity of another chain": other_identity(chain="b" * 32),
    "an identity of a folder": other_identity(chain="../x"),
    "an identity with the signature of another": other_signature(
        Author(MALLORY).store, signature_place(9)
    ),
    "an identity with another chain's signature": other_signature(
        Author(chain_id="b" * 32).store, signature_place(1, "b" * 32)
    ),
    "no signature of the identity": lambda s: s.delete(signature_place(1)),
    "a large signature of the identity": lambda s: s.put(signature_place(1), b" " * (1 << 20)),
}
"""What the store may show to a follower that joins."""

IDENTITY = {name for name in NEWCOMER if "identity" in name or name.startswith("another chain of")}
"""Attacks on what an open follower does not read again, or tells by the versions that it holds."""


def error_of(name: str) -> type[errors.DeltaChainError]:
    return errors.ChainMismatchError if name == OF_ANOTHER else errors.SignatureError


def updated(store: MemoryStore, *trusted: int) -> Follower:
    follower = Follower(store, *trusted)
    follower.subscriber.update()
    return follower


def chain() -> MemoryStore:
    return Author().grow(2).anchor().grow(HEAD - 1).store


@pytest.mark.parametrize("name", NEWCOMER)
def test_a_newcomer_refuses_it(name: str) -> None:
    store = chain()
    NEWCOMER[name](store)
    follower = Follower(store, 1)
    with pytest.raises(error_of(name)) as caught:
        follower.subscriber.update()
    assert caught.value.hint
    assert follower.holds(np.zeros_like(bits_of(0)))


@pytest.mark.parametrize("name", sorted(NEWCOMER.keys() - IDENTITY))
@pytest.mark.parametrize("held", [0, HEAD - 1])
def test_a_follower_that_holds_a_version_refuses_it(name: str, held: int) -> None:
    store = chain()
    follower = Follower(store, 1)
    follower.subscriber.update(held)
    NEWCOMER[name](store)
    with pytest.raises((error_of(name), errors.ForkedChainError)):
        follower.subscriber.update()
    assert follower.holds(bits_of(held))
    assert follower.subscriber.version == held


def test_without_trusted_keys_the_same_forgeries_are_applied() -> None:
    """So the attacks are real: only signatures tell."""
    for name in ("all versions linked anew", "another chain of another"):
        store = chain()
        NEWCOMER[name](store)
        assert updated(store).holds(bits_of(HEAD, evil=1))


@pytest.mark.parametrize("trusted", [(), (1,), (9, 1)])
def test_a_signed_chain_is_read_with_and_without_trusted_keys(trusted: tuple[int, ...]) -> None:
    assert updated(chain(), *trusted).holds(bits_of(HEAD))


def test_a_follower_that_saw_a_newer_head_refuses_an_older_one() -> None:
    store = chain()
    old = objects_of(store)
    put_back(store, objects_of(Author().grow(2).anchor().grow(HEAD + 1).store))
    follower = updated(store, 1)
    put_back(store, old)
    with pytest.raises(errors.ChainError):
        follower.subscriber.update(HEAD)
    with pytest.raises((errors.StoreWentBackError, errors.ChainError)):
        follower.subscriber.update()
    assert follower.holds(bits_of(HEAD + 2))


@pytest.mark.parametrize("first", [1, 2, HEAD])
def test_a_history_without_its_beginning_leads_to_the_signed_bits_or_nowhere(first: int) -> None:
    store = chain()
    for version in range(first):
        store.delete(keys.manifest_key(version))
    follower = Follower(store, 1)
    try:
        follower.subscriber.update()
    except (errors.ChainError, errors.ObjectNotFoundError):
        assert follower.holds(np.zeros_like(bits_of(0)))
    else:
        assert follower.holds(bits_of(HEAD))


def test_a_version_of_an_older_epoch_is_refused_though_it_is_signed() -> None:
    author = Author().grow(2, epoch=1)
    follower = updated(author.store, 1)
    author.grow(1, epoch=0)  # by a publisher that was fenced, and has the same key
    with pytest.raises(errors.ForkedChainError, match="older than the held"):
        follower.subscriber.update()
    assert follower.holds(bits_of(1))


@pytest.mark.parametrize("author", [Author(NOBODY, evil=1), Author(MALLORY, evil=1)])
def test_an_unsigned_anchor_in_the_hint_is_planned_around(author: Author) -> None:
    store = chain()
    head = Chain.open(store, NOBODY).read(HEAD)
    author.grow(HEAD + 1)
    assert author.parent is not None
    part = author.put("anchor", None, HEAD, [])
    summary = author.chain.add_edge(head, part, "")
    for key in (part.parts[0].key, summary.record):
        store.put(key, author.store.get(key))
    store.put(keys.HEAD_KEY, dump(Head(version=HEAD, anchors=(summary,))))
    assert updated(store, 1).holds(bits_of(HEAD))


def test_a_listed_edge_record_counts_by_its_digest_alone() -> None:
    author = Author().grow(1).with_trust(NOBODY).anchor().with_trust(OWNER).grow(2)
    assert signatures_of(author.store, keys.edge_key(0, "anchor", None)) == []
    assert updated(author.store, 1).holds(bits_of(2))
    place = keys.edge_key(0, "anchor", None)
    other = Author(NOBODY, evil=1).grow(1).anchor()
    author.store.put(place, other.store.get(place))
    opened = Chain.open(author.store, trust_of(1))
    (listed,) = (e for e in opened.read(2).manifest.recent if e.record)
    with pytest.raises(errors.DigestMismatchError):
        opened.edge(listed)


def begun(before: int, after: int) -> Author:
    author = Author(NOBODY).grow(before).with_trust(trust_of(key=1))
    for key, data in author.chain.sign_identity().items():
        author.store.put(key, data)
    return author.grow(after)


@pytest.mark.parametrize("before", [1, 5, 40])
def test_signing_may_begin_in_the_middle(before: int) -> None:
    store = begun(before, 3).store
    assert updated(store, 1).holds(bits_of(before + 2))
    late = Follower(store, 1)
    late.subscriber.update(0)  # from before the first signature: named through the parents
    late.subscriber.update()
    assert late.holds(bits_of(before + 2))


@pytest.mark.parametrize("version", [0, 3, 4])
@pytest.mark.parametrize("target", [0, 4, None])
def test_an_old_manifest_that_is_not_the_one_named_is_refused(
    version: int, target: int | None
) -> None:
    store, other = begun(5, 3).store, Author(NOBODY, evil=1).grow(6).store
    store.put(keys.manifest_key(version), other.get(keys.manifest_key(version)))
    for key, data in objects_of(other).items():
        if key.startswith(("deltas/", "anchors/")):
            store.put(key, data)
    follower = Follower(store, 1)
    with pytest.raises(errors.DeltaChainError):
        follower.subscriber.update(target)
    assert follower.holds(np.zeros_like(bits_of(0)))


def test_the_newest_version_must_be_signed() -> None:
    author = begun(3, 2)
    follower = updated(author.store, 1)
    author.with_trust(NOBODY).grow(1)
    with pytest.raises(errors.SignatureError, match="it has no signature"):
        follower.subscriber.update()
    assert follower.holds(bits_of(4))
    assert follower.subscriber.version == 4


def test_a_new_key_replaces_an_old_one_while_both_are_trusted() -> None:
    author = Author().grow(2)
    both = updated(author.store, 1, 2)
    author.with_trust(trust_of(1, 2, key=2)).grow(2)
    both.subscriber.update()
    new = updated(author.store, 2)  # the old key was taken out: old versions count by digest
    for follower in (both, new):
        assert follower.holds(bits_of(3))
    old = Follower(author.store, 1)
    with pytest.raises(errors.SignatureError, match=f"by the key '{key_of(2).public.key_id}'"):
        old.subscriber.update()
    assert old.holds(np.zeros_like(bits_of(0)))


def test_a_publisher_goes_on_from_no_unsigned_version() -> None:
    store = chain()
    forged_versions(store, Author(NOBODY, evil=1).grow(HEAD + 2).store)
    author = Author()
    author.store = store
    with pytest.raises(errors.SignatureError):
        author.with_trust(OWNER).chain.head()


def test_a_publisher_lists_no_record_that_another_left_in_its_place() -> None:
    author = Author().grow(1)
    key = keys.edge_key(0, "anchor", None)
    author.store.put(key, Author(NOBODY).grow(1).anchor().store.get(key))
    assert author.parent is not None
    digest = author.parent.digest
    edit(author.store, key, lambda d: d.update(manifest=digest), keeps=False)
    with pytest.raises(errors.SignatureError, match="it has no signature"):
        author.anchor()


def test_digests_of_a_signed_chain_are_those_of_its_bytes() -> None:
    store = chain()
    opened = Chain.open(store, trust_of(1))
    for version in range(HEAD + 1):
        found = opened.read(version)
        assert found.digest == keys.object_digest(store.get(keys.manifest_key(version)))
        assert found.signed_by == (key_of(1).public.key_id,)

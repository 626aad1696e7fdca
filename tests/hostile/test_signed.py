"""The store is the attacker: whatever it shows, only what a trusted key signed is applied."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from deltachain import errors
from deltachain.chain.chain import Chain
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
    objects,
    replace_all,
    resign,
    signature_place,
    signatures_of,
    trust_of,
)

Attack = Callable[[MemoryStore], object]
HEAD = 3


def rewritten(store: MemoryStore, author: Author) -> None:
    replace_all(store, objects(author.store))


def forged_versions(store: MemoryStore, author: Author) -> None:
    for key, data in objects(author.store).items():
        if key not in (keys.CHAIN_KEY, keys.TABLE_KEY) and not key.startswith(
            ("assets/", "signatures/")
        ):
            store.put(key, data)


def swap_signatures(store: MemoryStore) -> None:
    """The head's payload is an attacker's, under the true signature of version 2."""
    edit(store, keys.manifest_key(HEAD), lambda d: d.update(nnz=0), keeps=True)
    resign(store, keys.manifest_key(HEAD), signatures_of(store, keys.manifest_key(2)))


def other_identity(**fields: object) -> Attack:
    def act(store: MemoryStore) -> None:
        store.put(keys.CHAIN_KEY, dumps(json.loads(store.get(keys.CHAIN_KEY)) | fields))

    return act


def identity_of_mallory(store: MemoryStore) -> None:
    other = Author(MALLORY).grow(HEAD + 1)
    store.put(signature_place(1), other.store.get(signature_place(9)))


def identity_by_another_chain(store: MemoryStore) -> None:
    other = Author(chain_id="b" * 32)
    store.put(signature_place(1), other.store.get(signature_place(1, "b" * 32)))


def other_chain(store: MemoryStore) -> None:
    forged_versions(store, Author(chain_id="b" * 32, evil=1).grow(HEAD + 1))


def renamed_chain(store: MemoryStore) -> None:
    """They say that they are of this chain."""
    other_chain(store)
    for version in range(HEAD + 1):
        edit(store, keys.manifest_key(version), lambda d: d.update(chain=f"{7:032x}"), keeps=True)


def record_as_manifest(store: MemoryStore) -> None:
    """The owner's signature of an edge record, under a manifest."""
    resign(store, keys.manifest_key(HEAD), signatures_of(store, keys.edge_key(1, "anchor", None)))


def many_signatures(store: MemoryStore) -> None:
    (true,) = signatures_of(store, keys.manifest_key(HEAD))
    edit(store, keys.manifest_key(HEAD), lambda d: d.update(nnz=0), keeps=False)
    resign(store, keys.manifest_key(HEAD), [true] * 1000)


def another_algorithm(store: MemoryStore) -> None:
    true = signatures_of(store, keys.manifest_key(HEAD))
    resign(store, keys.manifest_key(HEAD), [true[0] | {"algorithm": "none"}])


def false_value(value: str) -> Attack:
    def act(store: MemoryStore) -> None:
        true = signatures_of(store, keys.manifest_key(HEAD))
        resign(store, keys.manifest_key(HEAD), [true[0] | {"value": value}])

    return act


def unsigned_head(store: MemoryStore) -> None:
    resign(store, keys.manifest_key(HEAD), [])


def rehash(*, keeps: bool) -> Attack:
    def act(store: MemoryStore) -> None:
        forged = Author(NOBODY, evil=1).grow(HEAD + 1)
        key = keys.manifest_key(HEAD)
        part = json.loads(forged.store.get(key))["payload"]["edge"]["parts"][0]
        store.put(part["key"], forged.store.get(part["key"]))
        edit(store, key, lambda d: d["edge"].update(parts=[part]), keeps=keeps)

    return act


NEWCOMER: dict[str, tuple[Attack, type[errors.DeltaChainError]]] = {
    "other weights, hashed again": (rehash(keeps=False), errors.SignatureError),
    "other weights under the true signature": (rehash(keeps=True), errors.SignatureError),
    "the head without its signature": (unsigned_head, errors.SignatureError),
    "swapped signatures": (swap_signatures, errors.SignatureError),
    "the signature of an edge record": (record_as_manifest, errors.SignatureError),
    "a thousand false signatures": (many_signatures, errors.SignatureError),
    "another algorithm": (another_algorithm, errors.SignatureError),
    "an empty signature": (false_value(""), errors.SignatureError),
    "a signature of zeros": (false_value("0" * 128), errors.SignatureError),
    "a signature in capitals": (false_value("A" * 128), errors.SignatureError),
    "all versions linked anew": (
        lambda s: forged_versions(s, Author(NOBODY, evil=1).grow(HEAD + 1)),
        errors.SignatureError,
    ),
    "all versions signed by another": (
        lambda s: forged_versions(s, Author(MALLORY, evil=1).grow(HEAD + 1)),
        errors.SignatureError,
    ),
    "another chain of nobody": (
        lambda s: rewritten(s, Author(NOBODY, evil=1).grow(HEAD + 1)),
        errors.SignatureError,
    ),
    "another chain of another": (
        lambda s: rewritten(s, Author(MALLORY, evil=1).grow(HEAD + 1)),
        errors.SignatureError,
    ),
    "versions of another chain of the owner": (other_chain, errors.ChainMismatchError),
    "these under this chain's name": (renamed_chain, errors.SignatureError),
    "an identity with another table": (other_identity(table="0" * 64), errors.SignatureError),
    "an identity without files": (other_identity(assets=[]), errors.SignatureError),
    "an identity of another chain": (other_identity(chain="b" * 32), errors.SignatureError),
    "an identity of a folder": (other_identity(chain="../x"), errors.SignatureError),
    "an identity with the signature of another": (identity_of_mallory, errors.SignatureError),
    "an identity with another chain's signature": (
        identity_by_another_chain,
        errors.SignatureError,
    ),
    "no signature of the identity": (lambda s: s.delete(signature_place(1)), errors.SignatureError),
    "a large signature of the identity": (
        lambda s: s.put(signature_place(1), b" " * (1 << 20)),
        errors.SignatureError,
    ),
}
"""What the store may show to a follower that joins, and how it is refused."""

IDENTITY = {name for name in NEWCOMER if "identity" in name or "another chain of" in name} - {
    "versions of another chain of the owner"
}
"""Attacks on what an open follower does not read again, or tells by the versions that it holds."""


def chain() -> MemoryStore:
    return Author().grow(2).anchor().grow(HEAD - 1).store


@pytest.mark.parametrize("name", NEWCOMER)
def test_a_newcomer_refuses_it(name: str) -> None:
    attack, error = NEWCOMER[name]
    store = chain()
    attack(store)
    follower = Follower(store, 1)
    with pytest.raises(error) as caught:
        follower.subscriber.update()
    assert caught.value.hint
    assert follower.holds(np.zeros_like(bits_of(0)))


@pytest.mark.parametrize("name", sorted(NEWCOMER.keys() - IDENTITY))
@pytest.mark.parametrize("held", [0, HEAD - 1])
def test_a_follower_that_holds_a_version_refuses_it(name: str, held: int) -> None:
    attack, error = NEWCOMER[name]
    store = chain()
    follower = Follower(store, 1)
    follower.subscriber.update(held)
    attack(store)
    with pytest.raises((error, errors.ForkedChainError)):
        follower.subscriber.update()
    assert follower.holds(bits_of(held))
    assert follower.subscriber.version == held


def test_without_trusted_keys_the_same_forgeries_are_applied() -> None:
    """So the attacks are real: only signatures tell."""
    for name in ("all versions linked anew", "another chain of another"):
        store = chain()
        NEWCOMER[name][0](store)
        follower = Follower(store)
        follower.subscriber.update()
        assert follower.holds(bits_of(HEAD, evil=1))


@pytest.mark.parametrize("trusted", [(), (1,), (9, 1)])
def test_a_signed_chain_is_read_with_and_without_trusted_keys(trusted: tuple[int, ...]) -> None:
    follower = Follower(chain(), *trusted)
    follower.subscriber.update()
    assert follower.holds(bits_of(HEAD))


def test_a_follower_that_saw_a_newer_head_refuses_an_older_one() -> None:
    store = chain()
    old = objects(store)
    author_of_more = Author().grow(2).anchor().grow(HEAD - 1).grow(2)
    replace_all(store, objects(author_of_more.store))
    follower = Follower(store, 1)
    follower.subscriber.update()
    replace_all(store, old)
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
    follower = Follower(author.store, 1)
    follower.subscriber.update()
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
    follower = Follower(store, 1)
    follower.subscriber.update()
    assert follower.holds(bits_of(HEAD))


def test_a_listed_edge_record_counts_by_its_digest_alone() -> None:
    author = Author().grow(1).with_trust(NOBODY).anchor().with_trust(OWNER).grow(2)
    assert signatures_of(author.store, keys.edge_key(0, "anchor", None)) == []
    follower = Follower(author.store, 1)
    follower.subscriber.update()
    assert follower.holds(bits_of(2))
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
    follower = Follower(store, 1)
    follower.subscriber.update()
    assert follower.holds(bits_of(before + 2))
    late = Follower(store, 1)
    late.subscriber.update(0)  # from before the first signature: named through the parents
    late.subscriber.update()
    assert late.holds(bits_of(before + 2))


@pytest.mark.parametrize("version", [0, 3, 4])
@pytest.mark.parametrize("target", [0, 4, None])
def test_an_old_manifest_that_is_not_the_one_named_is_refused(
    version: int, target: int | None
) -> None:
    store = begun(5, 3).store
    forged = Author(NOBODY, evil=1).grow(6).store
    store.put(keys.manifest_key(version), forged.get(keys.manifest_key(version)))
    for key, data in objects(forged).items():
        if key.startswith(("deltas/", "anchors/")):
            store.put(key, data)
    follower = Follower(store, 1)
    with pytest.raises(errors.DeltaChainError):
        follower.subscriber.update(target)
    assert follower.holds(np.zeros_like(bits_of(0)))


def test_the_newest_version_must_be_signed() -> None:
    author = begun(3, 2)
    follower = Follower(author.store, 1)
    follower.subscriber.update()
    author.with_trust(NOBODY).grow(1)
    with pytest.raises(errors.SignatureError, match="it has no signature"):
        follower.subscriber.update()
    assert follower.holds(bits_of(4))
    assert follower.subscriber.version == 4


def test_a_new_key_replaces_an_old_one_while_both_are_trusted() -> None:
    author = Author().grow(2)
    both = Follower(author.store, 1, 2)
    both.subscriber.update()
    author.with_trust(trust_of(1, 2, key=2)).grow(2)
    both.subscriber.update()
    new = Follower(author.store, 2)  # the old key was taken out: old versions count by digest
    new.subscriber.update()
    for follower in (both, new):
        assert follower.holds(bits_of(3))
    old = Follower(author.store, 1)
    with pytest.raises(errors.SignatureError, match=f"by the key '{key_of(2).public.key_id}'"):
        old.subscriber.update()
    assert old.holds(np.zeros_like(bits_of(0)))


def test_a_publisher_goes_on_from_no_unsigned_version() -> None:
    store = chain()
    forged_versions(store, Author(NOBODY, evil=1).grow(HEAD + 2))
    author = Author()
    author.store = store
    with pytest.raises(errors.SignatureError):
        author.with_trust(OWNER).chain.head()


def test_a_publisher_lists_no_record_that_another_left_in_its_place() -> None:
    author = Author().grow(1)
    key = keys.edge_key(0, "anchor", None)
    forged = Author(NOBODY).grow(1).anchor().store.get(key)
    author.store.put(key, forged)
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

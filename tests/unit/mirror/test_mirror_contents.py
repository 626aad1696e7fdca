"""What a mirror has and lacks: compared by listings that go by, as by dictionaries of all keys."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Mapping

import numpy as np
import pytest

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.format.keys import (
    HEAD_KEY,
    MIRROR_KEY,
    PAYLOADS,
    edge_key,
    manifest_key,
    payload_key,
    prune_key,
    version_of,
)
from deltachain.mirror import Mirror
from deltachain.mirror import mirror as loop
from deltachain.mirror.contents import MirrorContents
from deltachain.mirror.plan import is_payload
from deltachain.store import MemoryStore, Store
from tests.unit.mirror.conftest import Grow, copy_of

IDENTITY = ("chain.json", "table.json")


def keys_of(version: int) -> list[str]:
    found = [manifest_key(version), payload_key("delta", version, 0, "a" * 32, 0)]
    if version % 8 == 0 and version:
        found += [edge_key(version, "skip", version - 8), edge_key(version, "anchor", None)]
        found += [payload_key(kind, version, 0, "a" * 32, 0) for kind in ("skip", "anchor")]
    return found


def some_stores(seed: int, versions: int) -> tuple[MemoryStore, MemoryStore]:
    """A source, and a mirror that lacks some of it, has some of it torn, and has more."""
    random = np.random.default_rng(seed)
    source, mirror = MemoryStore(), MemoryStore()
    others = (*IDENTITY, "prunes/00000000.json", "tags/a/00000000.json")
    for key in (*others, *(key for version in range(versions) for key in keys_of(version))):
        source.put(key, bytes(random.integers(1, 9)))
    for info in source.list():
        if random.random() < 0.9:
            mirror.put(info.key, source.get(info.key))
        elif random.random() < 0.3 and is_payload(info.key):
            mirror.put(info.key, b"torn by a write that was cut")
        elif random.random() < 0.5 and not is_payload(info.key):
            mirror.put(info.key, b"")  # left by a writer that was killed
    for info in list(source.list()):
        if random.random() < 0.05 and not info.key.startswith("manifests/"):
            source.delete(info.key)
    return source, mirror


def sizes(store: Store) -> dict[str, int]:
    return {info.key: info.nbytes for info in store.list()}


def expected(source: Mapping[str, int], there: Mapping[str, int], first: int) -> dict[str, object]:
    """The comparison as FORMAT.md has it, from all keys at once; what is empty is absent."""
    head = max(version_of(key) or 0 for key in source if key.startswith("manifests/"))
    there = {key: nbytes for key, nbytes in there.items() if nbytes}
    missing = {
        key: nbytes
        for key, nbytes in source.items()
        if there.get(key) != nbytes
        and key not in IDENTITY
        and not (is_payload(key) and (version_of(key) or 0) < first)
    }
    torn = {version_of(key) or 0 for key in missing if is_payload(key)}
    absent = {version for version in range(head + 1) if manifest_key(version) not in there}
    recorded = {version_of(key) for key in there if key.startswith("edges/")}
    return {
        "missing": missing,
        "versions": tuple(sorted(absent | torn)),
        "records": {
            key
            for key in source
            if key.startswith("edges/") and (key in missing or version_of(key) in torn - absent)
        },
        "payloads": {key for key in source if is_payload(key)},
        "unproven": {
            key
            for key in there
            if is_payload(key)
            and (
                version_of(key) in absent
                or not (key.startswith("deltas/") or version_of(key) in recorded)
            )
        },
    }


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("first", [0, 40])
def test_the_first_comparison_is_that_of_all_keys(seed: int, first: int) -> None:
    source, mirror = some_stores(seed, 100)
    contents = MirrorContents(mirror)
    found = contents.compare(source, first=first, head=99, identity=IDENTITY, is_first=True)
    wanted = expected(sizes(source), sizes(mirror), first)
    given = {name: getattr(found, name) for name in wanted}
    given |= {"versions": tuple(found.versions), "records": set(found.records)}
    assert given == wanted
    lacking = {key for key, nbytes in sizes(source).items() if contents.lacks(key, nbytes)}
    held = {key for key, nbytes in sizes(mirror).items() if nbytes and not is_payload(key)}
    assert {key for key in lacking if key.startswith("manifests/")} == {
        key for key in sizes(source) if key.startswith("manifests/") and key not in held
    }
    whole = min(
        (version for version in range(100) if manifest_key(version) not in held), default=100
    )
    assert contents.newest == whole - 1


def test_a_lost_manifest_is_found_by_the_comparison_that_lists_its_thousand() -> None:
    source, mirror = MemoryStore(), MemoryStore()
    for version in range(2500):
        source.put(manifest_key(version), b"1")
        mirror.put(manifest_key(version), b"1")
    contents = MirrorContents(mirror)

    def lost() -> tuple[int, ...]:
        found = contents.compare(source, first=0, head=2499, identity=IDENTITY, is_first=False)
        return tuple(found.versions)

    contents.compare(source, first=0, head=2499, identity=IDENTITY, is_first=True)
    for version in (7, 1003, 2400):
        mirror.delete(manifest_key(version))
    mirror.put(manifest_key(1003), b"")  # of a writer that was killed
    assert [lost() for _ in range(3)] == [(7,), (7, 1003), (7, 1003, 2400)]
    assert contents.newest == 6
    for version in (7, 1003, 2400):
        mirror.put(manifest_key(version), b"1")
        contents.add(manifest_key(version), 1)
    assert [lost() for _ in range(3)] == [(), (), ()]
    assert contents.newest == 2499
    for version in (7, 1003, 2499):  # a mirror without its newest version may lack any other
        mirror.delete(manifest_key(version))
    assert lost() == (7, 1003, 2499)


def test_an_old_edge_record_is_looked_up() -> None:
    source, mirror = MemoryStore(), MemoryStore()
    for version in range(2000):
        mirror.put(manifest_key(version), b"1")
    key, other = edge_key(8, "skip", 0), edge_key(16, "skip", 8)
    mirror.put(key, b"1")
    contents = MirrorContents(mirror)
    contents.compare(source, first=0, head=1999, identity=IDENTITY, is_first=True)
    assert contents.has(key)
    assert not contents.has(other)


def held_by(versions: int) -> int:
    """Memory in bytes that a comparison leaves behind, for a mirror that is pruned."""
    source, mirror = MemoryStore(), MemoryStore()
    for version in range(versions):
        for key in keys_of(version):
            if version > versions - 100 or not key.startswith(PAYLOADS):
                source.put(key, b"1")
                mirror.put(key, b"1")
    for number in range(10):
        mirror.put(prune_key(number), b"1")
    contents = MirrorContents(mirror)
    for is_first in (True, False):
        contents.compare(source, first=0, head=versions - 1, identity=IDENTITY, is_first=is_first)
    gc.collect()
    tracemalloc.start()
    found = contents.compare(source, first=0, head=versions - 1, identity=IDENTITY, is_first=False)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not found.versions
    return held


def test_the_memory_of_a_comparison_does_not_grow_with_the_versions() -> None:
    a_byte_each = 6000  # more than other threads of the test process allocate meanwhile
    assert held_by(8000) < held_by(2000) + a_byte_each


@pytest.mark.parametrize("restarts", [False, True])
def test_documents_that_a_killed_writer_left_empty_are_copied_again(
    source: MemoryStore,
    mirror_store: MemoryStore,
    grow: Grow,
    restarts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "SURVEY", 1)
    grow(20)
    chain = Chain.open(source)
    tags.set_(chain, "best", chain.read(3), time=1.0)
    mirror = Mirror(source, mirror_store)
    list(mirror.catch_up())
    whole = copy_of(mirror_store)
    for key in whole:
        if not key.startswith(PAYLOADS) and key not in (MIRROR_KEY, HEAD_KEY):
            mirror_store.put(key, b"")
    mirror = Mirror(source, mirror_store) if restarts else mirror
    list(mirror.catch_up())
    assert copy_of(mirror_store) == whole

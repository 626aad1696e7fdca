"""A version by number, step, tag or time, in few reads of manifests."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.chain.tags import VersionChoice, choose
from deltachain.cli.options import seconds
from deltachain.errors import ChainError, ConfigError
from deltachain.format.keys import manifest_key
from deltachain.store import MemoryStore
from tests.unit.manifest_chains import WideStore, create, manifest_after
from tests.unit.test_tags import filled

Row = tuple[int, int | None, float]
"""Epoch, step and time of a version."""


class ReadStore(MemoryStore):
    """One that counts the manifests that are read."""

    reads = 0

    def get(self, key: str, *, limit: int = 1 << 26) -> bytes:
        self.reads += key.startswith("manifests/")
        return super().get(key, limit=limit)


def made(rows: Iterable[Row], store: MemoryStore | None = None) -> tuple[Chain, MemoryStore]:
    """A chain of versions with these epochs, steps and times."""
    store = store or ReadStore()
    chain, parent = create(store), None
    for epoch, step, time in rows:
        parent = chain.commit(
            manifest_after(parent, epoch=epoch, step=step, time=time, recent=(), window_from=0)
            if parent is None
            else manifest_after(parent, epoch=epoch, step=step, time=time)
        )
    return Chain.open(store), store


def one_run(versions: int) -> list[Row]:
    return [(0, 10 * version, 100.0 + version) for version in range(versions)]


def test_the_head_is_meant_where_nothing_is_said() -> None:
    chain, _ = made(one_run(5))
    assert choose(chain, VersionChoice()).version == 4
    assert choose(chain, VersionChoice(version=2)).version == 2


def test_two_names_of_a_version_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="version and step exclude each other"):
        VersionChoice(version=1, step=1)
    with pytest.raises(ConfigError, match="at and tag exclude each other"):
        VersionChoice(at=1.0, tag="best")
    assert VersionChoice(step=0).is_search
    assert not VersionChoice(version=0).is_search


@pytest.mark.parametrize("store", [ReadStore, WideStore])
def test_steps_of_one_run_are_bisected(store: type[MemoryStore]) -> None:
    chain, _ = made(one_run(300), store())
    for version in (0, 1, 2, 150, 298, 299):
        assert choose(chain, VersionChoice(step=10 * version)).version == version


def test_a_search_reads_few_manifests() -> None:
    chain, store = made(one_run(1000))
    assert isinstance(store, ReadStore)
    for choice in (
        VersionChoice(step=4000),
        VersionChoice(step=4005),
        VersionChoice(at=500.5),
        VersionChoice(at=0.0),
    ):
        store.reads = 0
        try:
            choose(chain, choice)
        except ChainError:
            assert choice in (VersionChoice(step=4005), VersionChoice(at=0.0))
        assert store.reads <= 34


def test_the_newest_of_a_step_that_came_twice_is_meant() -> None:
    """A trainer went back to step 20; its publisher took the chain over with the step before."""
    rows: list[Row] = [(0, 10 * n, 0.0) for n in range(8)]
    rows += [(1, 70, 0.0), (1, None, 0.0), *((1, step, 0.0) for step in (30, 40, 50))]
    chain, _ = made(rows)
    wanted = {70: (7, 8), 60: (6,), 50: (12,), 40: (11,), 30: (10,), 20: (2,), 0: (0,)}
    for step, versions in wanted.items():
        assert choose(chain, VersionChoice(step=step)).version in versions


def test_a_version_that_was_reverted_to_is_the_newest_of_its_step() -> None:
    rows = [*((0, 10 * n, 0.0) for n in range(8)), (1, 70, 0.0), (1, 30, 0.0)]
    chain, _ = made(rows)
    assert choose(chain, VersionChoice(step=30)).version == 9
    chain, _ = made([*rows, (2, 30, 0.0), (2, 31, 0.0)])
    assert choose(chain, VersionChoice(step=30)).version == 10
    assert choose(chain, VersionChoice(step=31)).version == 11
    assert choose(chain, VersionChoice(step=60)).version == 6


def test_each_push_is_an_epoch_of_its_own() -> None:
    chain, store = made([(n, n // 2, 0.0) for n in range(200)])
    assert isinstance(store, ReadStore)
    assert choose(chain, VersionChoice(step=3)).version == 7
    assert store.reads <= 202


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_step_is_found_whatever_is_left_out(data: st.DataObject) -> None:
    """Within an epoch, steps grow and some versions have none."""
    rows: list[Row] = []
    for epoch in range(data.draw(st.integers(1, 4))):
        step = data.draw(st.integers(0, 40))
        for _ in range(data.draw(st.integers(1, 12))):
            step += data.draw(st.integers(0, 3))
            given_step = step if data.draw(st.booleans()) else None
            rows.append((epoch, given_step, 0.0))
    chain, _ = made(rows)
    for step in {row[1] for row in rows if row[1] is not None}:
        wanted = max(n for n, row in enumerate(rows) if row[1] == step)
        assert choose(chain, VersionChoice(step=step)).version == wanted


def test_a_step_that_no_version_has_is_refused_with_its_neighbours() -> None:
    chain, _ = made(one_run(40))
    with pytest.raises(ChainError, match=r"no version of step 155") as refused:
        choose(chain, VersionChoice(step=155))
    assert refused.value.hint == "near it are the steps 150 (version 15) and 160 (version 16)"
    chain, _ = made([(0, None, 0.0)] * 30)
    with pytest.raises(ChainError, match="no version has a step"):
        choose(chain, VersionChoice(step=1))


def test_the_newest_version_of_a_time_is_meant() -> None:
    chain, _ = made([(0, None, 1000.0 + 10 * (n // 2)) for n in range(50)])
    for at, version in ((1000.0, 1), (1009.9, 1), (1010.0, 3), (1e12, 49), (1240.0, 49)):
        assert choose(chain, VersionChoice(at=at)).version == version
    with pytest.raises(ChainError, match="at or before 1970-01-01T00:16:39") as refused:
        choose(chain, VersionChoice(at=999.5))
    assert refused.value.hint == "version 0 is the oldest, of 1970-01-01T00:16:40+00:00"


def test_lost_manifests_are_passed() -> None:
    chain, store = made(one_run(60))
    for version in (0, 20, 29, 30, 44):
        store.delete(manifest_key(version))
    chain = Chain.open(store)
    assert choose(chain, VersionChoice(step=280)).version == 28
    assert choose(chain, VersionChoice(at=129.5)).version == 28
    with pytest.raises(ChainError, match="no version of step 300"):
        choose(chain, VersionChoice(step=300))


def test_a_tag_is_meant() -> None:
    chain = filled(MemoryStore())
    tags.set_(chain, "best", chain.read(3), time=0.0)
    assert choose(chain, VersionChoice(tag="best")).version == 3
    with pytest.raises(ChainError, match="has no tag 'worst'"):
        choose(chain, VersionChoice(tag="worst"))


def test_versions_that_are_not_there_are_refused() -> None:
    chain, _ = made(one_run(3))
    with pytest.raises(ChainError, match="does not have version 7") as refused:
        choose(chain, VersionChoice(version=7))
    assert refused.value.hint == "the head is version 2"
    with pytest.raises(ChainError, match="no version yet"):
        choose(create(MemoryStore()), VersionChoice(step=1))


def test_times_are_read_as_iso_8601_or_seconds() -> None:
    assert seconds("1700000000.5") == 1700000000.5
    assert seconds("2023-11-14T22:13:20Z") == seconds("2023-11-14T23:13:20+01:00") == 1700000000.0
    for text in ("yesterday", "", "nan", "inf", "9999999-01-01"):
        with pytest.raises(ConfigError, match="is no time"):
            seconds(text)

"""The simulation of a fleet, with numbers that are computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from simpy import Environment
from typer.testing import CliRunner

from deltachain.bench.reach import figures, run
from deltachain.bench.reach.edge_sizes import edge_nbytes, make_edge
from deltachain.bench.reach.fleet import Delivery, SimulatedFleet, Steps
from deltachain.bench.reach.growth import Growth, Reading, SampledVersion, samples
from deltachain.bench.reach.link import Link
from deltachain.bench.reach.mirror_calls import MirrorCalls, count_mirror_calls
from deltachain.bench.reach.request_times import measure
from deltachain.bench.reach.settings import ModelSize, ReachConfig, RequestTimes
from deltachain.bench.reach.sized_store import SizedStore
from deltachain.chain.chain import Chain
from deltachain.cli import app
from deltachain.errors import ConfigError, ObjectNotFoundError
from deltachain.maintain.stats import reader_plans

NO_MIRROR = MirrorCalls(poll_reads=0, poll_writes=0, version_reads=0, version_writes=0, in_row=0)
TINY = ModelSize(name="tiny", numel=1_000_000, step_s=10)
SMALL = ReachConfig(models=(TINY,), followers=6, versions=130, steps=4, newcomers=600)
ONE = ReachConfig(
    models=(TINY,),
    followers=1,
    regions=1,
    versions=2,
    newcomers=0,
    requests=RequestTimes((0.1,)),
    link_gbps=8e-3,  # 1 MB a second
    store_gbps=16e-3,
    poll_s=1e-6,
)


def moment(version: int, parts: tuple[int, ...], poll: float = 1.0) -> SampledVersion:
    update = Reading(in_row=1, beside=1, documents_nbytes=0, parts=parts, edges=1)
    join = Reading(in_row=3, beside=20, documents_nbytes=0, parts=parts, edges=1)
    return SampledVersion(version=version, update=update, join=join, poll=poll, copied=parts)


def deliver(
    config: ReachConfig, *moments: SampledVersion, calls: MirrorCalls = NO_MIRROR
) -> Delivery:
    return SimulatedFleet(config, config.models[0], moments, calls).run()


def test_transfers_share_a_link_in_equal_parts() -> None:
    env, ends = Environment(), {}
    link = Link(env, rate=100, most=50)

    def transfer(name: str, at: float, nbytes: int) -> Steps:
        yield env.timeout(at)
        yield link.transfer(nbytes)
        ends[name] = env.now

    # Two at 50 each until 1 s; three at 33.3 until both have their last 50 at 2.5 s; one at 50.
    for name, at in (("a", 0), ("b", 0), ("c", 1)):
        env.process(transfer(name, at, 100))
    env.process(transfer("nothing", 9, 0))
    env.run()
    assert ends == pytest.approx({"a": 2.5, "b": 2.5, "c": 3.5, "nothing": 9.0})
    assert link.nbytes == 300


def test_a_follower_waits_for_manifest_part_and_bytes() -> None:
    seen = deliver(ONE, moment(1, (2_000_000,)))
    assert seen.waits == [[pytest.approx(0.1 + 0.1 + 2.0, abs=0.1001)]]  # within a poll's request
    assert seen.followers.nbytes == 2_000_000
    # manifest, part and the look for later ones; before, a poll each 0.1 s for 10 s
    assert seen.followers.reads == pytest.approx(3 + 100, abs=0.1)


def test_nine_parts_take_two_rounds_of_requests() -> None:
    eight = deliver(ONE, moment(1, (1,) * 8)).waits[0][0]
    nine = deliver(ONE, moment(1, (1,) * 9)).waits[0][0]
    assert nine - eight == pytest.approx(0.1, abs=1e-5)  # the same seed, the same poll


def test_four_followers_share_what_the_store_sends() -> None:
    seen = deliver(replace(ONE, followers=4), moment(1, (1_000_000,)))
    assert max(seen.waits[0]) == pytest.approx(0.2 + 2.0, abs=0.1001)  # 4 MB at 2 MB a second


def test_a_follower_that_lags_takes_several_versions_at_once() -> None:
    slow = replace(TINY, step_s=1)
    config = replace(ONE, models=(slow,))
    seen = deliver(config, *(moment(version, (2_500_000,)) for version in (1, 2, 3)))
    assert seen.jumps == 1
    assert len(seen.waits[0]) == 3
    assert seen.followers.nbytes == 7_500_000


def test_a_mirror_delays_its_region_by_its_copy() -> None:
    calls = MirrorCalls(poll_reads=1, poll_writes=0, version_reads=5, version_writes=2, in_row=3)
    config = replace(ONE, followers=2, regions=2, region_s=0.4, store_gbps=1.0)
    seen = deliver(config, moment(1, (1_000_000,)), calls=calls)
    # 3 documents and a part at 0.5 s each, 1 s of bytes, 1 s to put them, 0.1 s for two objects
    copied = 4 * 0.5 + 1.0 + 1.0 + 2 * 0.1
    near, far = seen.waits[0][0], seen.waits[1][0]
    assert near == pytest.approx(0.2 + 1.0, abs=0.1001)
    assert far == pytest.approx(copied + 0.2 + 1.0, abs=0.2002)
    assert seen.mirrors.nbytes == 1_000_000
    assert seen.mirrors.writes == 2


def test_a_newcomer_reads_documents_in_a_row_then_in_threads_then_parts() -> None:
    config = replace(ONE, newcomers=3600.0)
    seen = deliver(config, moment(1, (100_000,)))
    assert seen.joins
    # 3 in a row, 20 beside in two rounds of 16 threads, one part, 0.1 s of bytes alone
    assert min(seen.joins) == pytest.approx(0.6 + 0.1)


def test_dollars_are_bytes_and_requests_at_list_prices() -> None:
    step = figures.PerStep(
        reads=1_000_000,
        writes=100_000,
        followers_nbytes=900e9,
        newcomers_nbytes=90e9,
        mirrors_nbytes=10e9,
    )
    s3, r2, _ = figures.dollars(ReachConfig(regions=3), step, kept_nbytes=1_000_000_000_000)
    assert s3["step_elsewhere"] == pytest.approx(1000 * 0.09 + 0.4 + 0.5)
    assert s3["step_in_regions"] == pytest.approx(10 * 0.09 + 0.4 + 0.5)
    assert s3["storage_month"] == pytest.approx(3 * 1000 * 0.023)
    assert r2["step_elsewhere"] == pytest.approx(0.36 + 0.45)


def test_newcomers_have_what_followers_leave() -> None:
    step = figures.PerStep(
        reads=0, writes=0, followers_nbytes=10e9, newcomers_nbytes=0, mirrors_nbytes=0
    )
    config = ReachConfig(regions=2, store_gbps=16)  # 4 GB a second together, 1 for followers
    assert figures.most_newcomers(config, TINY, step, join_nbytes=3e9) == 3600


def test_sizes_are_the_measured_shares_of_an_anchor() -> None:
    assert edge_nbytes(TINY, 0) == 1_340_000
    assert edge_nbytes(TINY, 1) == 14_070
    large = ModelSize(name="large", numel=10**12, step_s=1)
    edge = make_edge(large, 9, 8, "delta")
    assert edge.nbytes == edge_nbytes(large, 1)
    assert len(edge.parts) == 8


def test_a_newcomer_reads_what_the_product_plans() -> None:
    growth = Growth(SMALL, TINY)
    grown = growth.run()
    chain = Chain.open(growth.store)
    head = chain.head()
    assert head is not None
    assert head.version == SMALL.versions - 1
    newest = reader_plans(chain, head)[0].plan
    assert newest is not None
    again = replace(SMALL, versions=200)
    looked = Growth(replace(again, steps=199), TINY).run().moments[SMALL.versions - 2]
    assert looked.version == head.version
    assert sum(looked.join.parts) == newest.nbytes
    assert looked.join.edges == len(newest.edges) > 1
    assert [one.version for one in grown.moments] == sorted(samples(SMALL))


def test_pruning_bounds_what_is_kept() -> None:
    config = replace(SMALL, versions=600, keep_last=20, steps=1)
    grown = Growth(config, TINY).run()
    most = 2 * edge_nbytes(TINY, 0) + 400 * edge_nbytes(TINY, 1)
    assert grown.put_nbytes > 600 * edge_nbytes(TINY, 1)
    assert grown.kept_nbytes < 0.8 * grown.put_nbytes
    assert grown.kept_nbytes < most + 5_000_000  # and manifests


@pytest.mark.slow
@pytest.mark.parametrize("numel", [2_000_000, 70_000_000_000])
def test_by_default_all_that_is_kept_is_at_most_one_and_a_half_times_the_deltas(
    numel: int,
) -> None:
    model = ModelSize(name="any", numel=numel, step_s=10)
    config = replace(ReachConfig(models=(model,)), versions=3000, steps=1)
    grown = Growth(config, model).run()
    deltas = config.versions * edge_nbytes(model, 1)
    assert grown.put_nbytes > 1.5 * deltas  # with what was pruned
    assert grown.kept_nbytes <= 1.5 * deltas


def test_a_sized_store_counts_as_providers_do() -> None:
    store = SizedStore()
    store.put("a/b", b"12")
    store.put_sized("a/c", 10**12)
    assert store.find("a/c") is not None
    assert store.get("a/b") == b"12"
    with pytest.raises(ObjectNotFoundError):
        store.get("a/none")
    assert [info.key for info in store.list("a/")] == ["a/b", "a/c"]
    store.delete("a/b")
    spent = store.spent()
    assert (spent.reads, spent.writes, spent.nbytes, spent.in_row) == (3, 3, 2, 3)
    assert store.nbytes == 10**12
    with pytest.raises(ValueError, match="no content"):
        store.get("a/c", limit=10**13)


def test_a_mirror_asks_little_without_a_version_and_copies_each_object_once() -> None:
    calls = count_mirror_calls()
    assert 1 <= calls.poll_reads < calls.version_reads
    assert 2 <= calls.version_writes < 6  # part and manifest, and now and then a hint or a list
    assert calls.poll_writes < 1


def test_request_times_are_measured_and_cleaned_up(tmp_path: Path) -> None:
    times = measure(f"file://{tmp_path}/store", 5)
    assert len(times.samples) == 5
    assert min(times.samples) > 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "times" in str(path)]


def test_the_command_prints_every_figure_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MODELS", (TINY,))
    plot = tmp_path / "reach.svg"
    command = ["bench", "reach", "--followers", "6", "--versions", "40", "--request-ms", "5"]
    result = CliRunner().invoke(app.app, [*command, "--json", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (row,) = found["models"]
    assert row["follower_s"]["median"] <= row["follower_s"]["p99"]
    assert any("5.0 ms" in line for line in found["assumptions"])
    assert row["egress_nbytes_a_step"]["followers"] >= 6 * edge_nbytes(TINY, 1)
    assert plot.read_text(encoding="utf-8").startswith("<?xml")
    result = CliRunner().invoke(app.app, command)
    assert "What this rests on" in result.stdout
    assert "Dollars at public list prices" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["reach", "--model", "7b"], "unknown model"),
        (["reach", "file:///nowhere", "--request-ms", "5"], "exclude each other"),
        (["codec", "--followers", "5"], "--followers"),
    ],
)
def test_wrong_options_are_refused_with_a_hint(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app.app, ["bench", *options])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "hint" in result.stderr.lower() or "→" in result.stderr or "one of" in result.stderr


@pytest.mark.parametrize("wrong", [{"followers": 0}, {"link_gbps": 0}, {"region_s": -1}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(ONE, **wrong)  # type: ignore[arg-type]


def test_a_request_time_is_needed() -> None:
    with pytest.raises(ConfigError, match="request times"):
        RequestTimes(())

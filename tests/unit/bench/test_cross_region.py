from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from deltachain.errors import ConfigError
from deltachain.types import TensorSpec
from tests.bench.chains import U16
from tests.bench.changes import changes_of
from tests.bench.cross_region import figures, network
from tests.bench.cross_region.__main__ import main
from tests.bench.cross_region.layouts import (
    Changes,
    Layout,
    SlimeDeltasZstd,
    TensorChange,
    TrlGaps,
    full_file,
    load_full,
)
from tests.bench.cross_region.measure import Sample
from tests.bench.cross_region.plan import (
    HUB,
    REPLICAS,
    STORE,
    TRAINER,
    Command,
    Link,
    NetworkPlan,
    sent_bytes,
)
from tests.bench.cross_region.scene import Scene, layout_of, make_scene
from tests.bench.layouts.trl import TRL_GAPS

PLACES = (TRAINER, STORE, *REPLICAS)
PLAN = NetworkPlan("abc", PLACES)


def test_every_place_has_a_namespace_and_an_address_of_its_own() -> None:
    assert len(set(PLAN.namespaces)) == len(PLACES) + 1
    assert len({PLAN.address(place.name) for place in PLACES}) == len(PLACES)
    assert all("abc" in name for name in PLAN.namespaces)


def test_two_runs_share_no_namespace() -> None:
    assert not {*PLAN.namespaces} & {*NetworkPlan("def", PLACES).namespaces}


def test_a_limited_link_is_limited_both_ways_and_the_store_not_at_all() -> None:
    limits = [command for command in PLAN.setup() if command[0] == "tc"]
    for place in (TRAINER, *REPLICAS):
        ends = [(PLAN.namespace(place.name), "wire"), (PLAN.namespace(HUB), f"to-{place.name}")]
        for namespace, interface in ends:
            (found,) = [c for c in limits if c[2] == namespace and interface in c]
            assert f"{place.link.mbit}mbit" in found
    assert len(limits) == 2 * (len(PLACES) - 1)


def test_nothing_is_made_outside_namespaces_of_the_run() -> None:
    for command in PLAN.setup():
        named = [word for word in command if word in PLAN.namespaces]
        assert named, command


def test_teardown_takes_away_every_namespace() -> None:
    added = {c[3] for c in PLAN.setup() if c[:3] == ("ip", "netns", "add")}
    assert {c[3] for c in PLAN.teardown() if c[:3] == ("ip", "netns", "del")} == added


def test_a_link_has_no_negative_rate_or_delay() -> None:
    with pytest.raises(ConfigError, match="negative"):
        Link(mbit=10, rtt_ms=-1)
    assert Link(mbit=10, rtt_ms=80).delay_s == 0.04


def test_bytes_are_those_that_left_through_the_limit() -> None:
    other = {"kind": "noqueue", "bytes": 7}
    limited = {"kind": "tbf", "bytes": 12_345, "packets": 9}
    assert sent_bytes(json.dumps([other, limited])) == 12_345
    with pytest.raises(ConfigError, match="no rate limit"):
        sent_bytes(json.dumps([other]))


@pytest.mark.parametrize(
    ("break_host", "message", "hint"),
    [
        (lambda patch: patch.setattr(sys, "platform", "darwin"), "darwin", "Linux"),
        (lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "root", "sudo"),
        (lambda patch: patch.setattr(shutil, "which", lambda _: None), "ip and tc", "iproute2"),
    ],
    ids=["linux", "root", "tools"],
)
def test_an_unfit_machine_is_refused_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    break_host: Callable[[pytest.MonkeyPatch], None],
    message: str,
    hint: str,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    break_host(monkeypatch)
    assert main([]) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert message in said
    assert hint in said


@pytest.mark.parametrize("failing", [None, 5])
def test_the_network_is_taken_away_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, failing: int | None
) -> None:
    ran: list[Command] = []

    def run(command: Command) -> str:
        ran.append(command)
        if len(ran) - 1 == failing:
            raise network.CrossRegionError("no")
        return ""

    monkeypatch.setattr(network, "check_host", lambda: None)
    monkeypatch.setattr(network, "_run", run)
    expected = KeyboardInterrupt if failing is None else network.CrossRegionError
    with pytest.raises(expected), network.network(PLACES):
        raise KeyboardInterrupt
    deleted = {command[3] for command in ran if command[:3] == ("ip", "netns", "del")}
    assert len(deleted) == len(PLACES) + 1


def some_changes(*, gap: int = 100) -> Changes:
    rng = np.random.default_rng(0)
    at = np.cumsum(rng.integers(1, gap, 500))
    bits = rng.integers(0, 1 << 16, 500, dtype=np.uint16)
    nothing = np.empty(0, np.int64)
    return {
        "one.weight": TensorChange((int(at[-1]) + 1,), at, bits),
        "none.weight": TensorChange((7,), nothing, np.empty(0, np.uint16)),
        "two.weight": TensorChange((int(at[-1]) + 1, 1), at[::2].copy(), bits[::2].copy()),
    }


@pytest.mark.parametrize("layout", [TrlGaps(), SlimeDeltasZstd()], ids=["trl", "slime"])
@pytest.mark.parametrize("gap", [100, 200_000], ids=["narrow", "wide"])
def test_layouts_give_back_what_went_in(layout: Layout, gap: int) -> None:
    changes = some_changes(gap=gap)
    data = layout.encode(changes, version=1, numel=10**9)
    found = {name: (indices, bits) for name, indices, bits in layout.decode(data)}
    for name, change in changes.items():
        if change.indices.size:
            indices, bits = found[name]
            assert np.array_equal(indices, change.indices)
            assert np.array_equal(bits, change.bits)
    assert found.keys() <= changes.keys()


def test_keys_tell_versions_apart() -> None:
    for layout in (TrlGaps(), SlimeDeltasZstd()):
        assert len({layout.key(version) for version in range(10)}) == 10


def test_trl_files_have_the_size_that_its_branches_write() -> None:
    rng = np.random.default_rng(0)
    old = {name: rng.integers(0, 1 << 16, 50_000, dtype=np.uint16) for name in ("a", "b.c")}
    step: dict[str, tuple[U16, U16]] = {}
    for name, bits in old.items():
        step[name] = (bits, bits ^ (rng.random(bits.size) < 0.01).astype(np.uint16))
    specs = [TensorSpec(name, "BF16", (bits.size,)) for name, bits in old.items()]
    counted = changes_of(step, specs)
    changes = {
        name: TensorChange((change.numel,), change.indices, change.new)
        for name, change in counted.items()
    }
    data = TrlGaps().encode(changes, version=1, numel=100_000)
    assert len(data) == TRL_GAPS.nbytes(counted)


def test_a_full_checkpoint_keeps_every_bit() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    weights = {"all": bits.view(torch.bfloat16)}
    live = {"all": torch.zeros_like(weights["all"])}
    load_full(full_file(weights), live)
    assert torch.equal(live["all"].view(torch.int16), bits)


@pytest.mark.parametrize("millions", [1, 8, 60, 200])
def test_models_have_about_as_many_parameters_as_asked_for(millions: int) -> None:
    assert abs(layout_of(millions * 10**6).numel / millions / 1e6 - 1) < 0.35


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("scene")
    return make_scene(folder, parameters=10**6, versions=2, density=0.01)


def test_a_scene_changes_as_asked_for(scene: Scene) -> None:
    flat = scene.first()
    for version in (1, 2):
        change = scene.change(version)
        assert 0.005 < change.indices.size / scene.numel < 0.02
        assert all(a < b for a, b in pairwise(change.indices.tolist()))
        assert np.all(flat[change.indices] != change.bits)
        flat[change.indices] = change.bits


def test_tensors_of_a_scene_are_views_of_its_weights(scene: Scene) -> None:
    flat = scene.first()
    tensors = scene.tensors(flat)
    assert sum(tensor.numel() for tensor in tensors.values()) == scene.numel
    flat[-1] ^= 1
    assert tensors[scene.spans[-1].spec.name].view(-1).view(torch.int16)[-1] == flat.view("<i2")[-1]


def sample(seconds: float) -> Sample:
    names = [place.name for place in REPLICAS]
    return Sample(
        version=1,
        sent_s=seconds / 2,
        served_s=dict.fromkeys(names, seconds),
        sent_nbytes=100,
        received_nbytes=dict.fromkeys(names, 200),
        mismatches=dict.fromkeys(names, 1),
    )


def test_figures_are_medians_and_ninth_deciles() -> None:
    assert figures.p90([3.0]) == 3.0
    assert figures.p90([float(n) for n in range(11)]) == 9.0
    (row, *_) = figures.rows({"one way": [sample(1), sample(2), sample(9)]})
    assert (row.median_s, row.sent_s, row.received_nbytes, row.mismatches) == (2, 1, 200, 3)


def why_not() -> str:
    """What keeps this machine from running it; empty if nothing does."""
    try:
        network.check_host()
    except ConfigError as exc:
        return str(exc)
    name = f"deltachain-probe-{os.getpid()}"
    added = ip("netns", "add", name)
    if added.returncode:
        return f"ip netns add: {added.stderr.strip()}"
    ip("netns", "del", name)
    return ""


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("ip") or "ip"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_way_brings_every_bit_to_every_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    before = ip("netns", "list").stdout.split()
    plot = tmp_path / "latency.svg"
    arguments = ["--parameters", "1", "--versions", "2", "--json", "--plot", str(plot)]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    assert len(rows) == 2 * len(found["samples"]) == 8
    assert all(row["mismatches"] == 0 for row in rows)
    far = [row for row in rows if row["replica"] == "a"]
    assert all(
        row["median_s"] > 0.1 for row in far
    )  # a look and a get: a round trip each, and half
    assert all(row["received_nbytes"] > 10_000 for row in rows)
    assert plot.exists()
    assert {*ip("netns", "list").stdout.split()} <= {*before}

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.source import collect_weights
from deltachain.publish.snapshot import (
    Memory,
    Slabs,
    Snapshot,
    SnapshotPlace,
    choose_place,
    read,
    reserve_nbytes,
)
from deltachain.publish.wire_form import Diff
from deltachain.store import MemoryStore
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same, train_


def snapshot_of(
    model: nn.Module,
    *,
    on_device: bool = False,
    dtype: str | None = None,
    where: SnapshotPlace | None = None,
) -> Snapshot:
    return Snapshot(collect_weights(model, dtype=dtype), where=where, on_device=on_device)


def kept(snapshot: Snapshot, model: nn.Module) -> dict[str, object]:
    return {w.spec.name: snapshot.bits(w).tolist() for w in collect_weights(model).weights}


def listed(diff: Diff) -> dict[str, list[list[int]]]:
    return {name: [part.tolist() for part in changes] for name, changes in diff.live.items()}


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", [None, "BF16"])
@pytest.mark.parametrize("model", [TinyModel, lambda: plain_model(dtype=torch.float32)])
def test_the_device_path_finds_what_the_host_path_finds(
    model: type[TinyModel], dtype: str | None, where: SnapshotPlace
) -> None:
    live = model()
    host = snapshot_of(live, dtype=dtype)
    device = snapshot_of(live, on_device=True, dtype=dtype, where=where)
    assert device.kernel == "device" != host.kernel
    for step in range(3):
        train_(live, step)
        found = host.diff_()
        assert listed(found) == listed(device.diff_())
        assert found.live
        assert host.state == device.state
        weights = collect_weights(live, dtype=dtype).weights
        assert all(np.array_equal(host.bits(w), device.bits(w)) for w in weights)


@pytest.mark.parametrize("where", [None, "host", "device"])
def test_a_diff_that_is_restored_is_found_again(where: SnapshotPlace | None) -> None:
    model = TinyModel()
    snapshot = snapshot_of(model, on_device=where is not None, where=where)
    before, state = kept(snapshot, model), snapshot.state
    train_(model, 1)
    diff = snapshot.diff_()
    after, moved = kept(snapshot, model), snapshot.state
    assert moved != state
    snapshot.restore(diff)
    assert (kept(snapshot, model), snapshot.state) == (before, state)
    assert listed(snapshot.diff_()) == listed(diff)
    snapshot.restore(diff)
    snapshot.redo(diff)
    assert (kept(snapshot, model), snapshot.state) == (after, moved)
    assert snapshot.diff_().live == {}


@pytest.mark.parametrize("where", [None, "host", "device"])
def test_a_diff_that_fails_moves_nothing(where: SnapshotPlace | None) -> None:
    model, last = plain_model(), torch.ones(1)
    model.register_buffer("last_scale", last)
    snapshot = snapshot_of(model, on_device=where is not None, where=where)
    before, state = kept(snapshot, model), snapshot.state
    train_(model, 1, share=0.5)
    last.fill_(torch.nan)
    with pytest.raises(ConfigError, match="'last_scale' is a scale that is not finite"):
        snapshot.diff_()
    last.fill_(1)
    assert (kept(snapshot, model), snapshot.state) == (before, state)
    assert set(snapshot.diff_().live) == {"0.bias", "0.weight", "1.bias", "1.weight"}


def test_tensors_that_a_load_replaced_are_found() -> None:
    model, other = plain_model(0), plain_model(1)
    snapshot = snapshot_of(model)
    model.load_state_dict(other.state_dict(), assign=True)
    snapshot.diff_()
    weights = collect_weights(model).weights
    assert same({w.spec.name: snapshot.bits(w) for w in weights}, bits_of(other))


def test_a_frozen_weight_that_is_trained_later_is_refused() -> None:
    model = TinyModel()
    snapshot = snapshot_of(model)
    model.frozen.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="was frozen"):
        snapshot.diff_()


def test_a_frozen_weight_that_is_written_to_is_refused() -> None:
    model = TinyModel()
    snapshot = snapshot_of(model)
    with torch.no_grad():
        model.frozen.weight[3, 2] += 1
    for _ in range(2):  # as long as it is so
        with pytest.raises(ConfigError, match=r"frozen\.weight.*changed since") as caught:
            snapshot.diff_()
    assert "state_dict" in caught.value.hint
    with torch.no_grad():
        model.frozen.weight[3, 2] -= 1
        model.frozen.weight.copy_(TinyModel().frozen.weight)
    assert listed(snapshot.diff_()) == {}


def test_a_vector_without_a_gradient_is_compared() -> None:
    """As biases of experts, which trainers move by hand."""
    model, store = plain_model(), MemoryStore()
    model[1].bias.requires_grad_(False)  # type: ignore[index]
    with Publisher("memory://x", store=store).attach(model) as publisher:
        model[1].bias.data += 1  # type: ignore[index]
        publisher.publish().result()
        assert same(recompute(store)[1].state, bits_of(model))


def test_a_frozen_inference_tensor_is_no_obstacle() -> None:
    with torch.inference_mode():
        model = TinyModel()
    assert listed(snapshot_of(model).diff_()) == {}


def test_empty_tensors_have_no_changes() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(3, 0))
    for on_device in (False, True):
        snapshot = snapshot_of(model, on_device=on_device)
        assert snapshot.diff_().live == {}


def test_a_batch_that_failed_to_be_enqueued_leaves_the_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Earlier batches have updated a snapshot on the device by then: they are put back."""
    model = plain_model()
    snapshot = snapshot_of(model, on_device=True, where="device")
    before, state = kept(snapshot, model), snapshot.state
    train_(model, 1, share=0.5)
    live, given = snapshot._source.live, []

    def fails() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(live()):
            if number == 3:
                raise MemoryError("no memory")
            given.append(name)
            yield name, tensor

    monkeypatch.setattr("deltachain.kernels.device_diff.BATCH_NBYTES", 1)
    monkeypatch.setattr(snapshot, "_source", replace(snapshot._source, live=fails))
    with pytest.raises(MemoryError):
        snapshot.diff_()
    assert len(given) == 3
    monkeypatch.undo()
    assert (kept(snapshot, model), snapshot.state) == (before, state)
    assert snapshot.diff_().live


@pytest.mark.parametrize("where", ["host", "device"])
def test_an_export_may_use_the_memory_of_its_tensors_again(where: SnapshotPlace) -> None:
    values = {
        name: torch.full((100,), number, dtype=torch.bfloat16) for number, name in enumerate("abc")
    }

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        room = torch.empty(100, dtype=torch.bfloat16)
        for name, value in values.items():
            yield name, room.copy_(value)

    snapshot = Snapshot(collect_weights(export), where=where, on_device=True)
    for name in "ac":
        values[name][7] += 1
    found = listed(snapshot.diff_())
    assert {name: indices for name, (indices, *_) in found.items()} == {"a": [7], "c": [7]}


def test_a_snapshot_is_on_the_host_or_on_the_device() -> None:
    with pytest.raises(ConfigError, match="snapshot='disk': expected one of"):
        PublishConfig(url="memory://x", snapshot="disk")  # type: ignore[arg-type]


def test_a_publisher_says_that_a_snapshot_cannot_be_on_the_device(tmp_path: Path) -> None:
    config = PublishConfig(url=str(tmp_path), snapshot="device")
    with pytest.raises(ConfigError, match="all weights are compared on the host"):
        Publisher(config).attach(plain_model())


def test_a_snapshot_goes_where_it_fits() -> None:
    reserve = reserve_nbytes(80, 4)
    assert reserve == 40 + 24
    assert choose_place(None, Memory(4 + reserve, 80), 4) == "device"
    assert choose_place(None, Memory(3 + reserve, 80), 4) == "host"
    assert choose_place("host", Memory(80, 80), 4) == "host"
    assert choose_place("device", Memory(0, 80), 4) == "device"


def test_tensors_of_a_snapshot_lie_side_by_side() -> None:
    slabs, host = Slabs({2: 24, 8: 2}), torch.device("cpu")
    taken = [slabs.take(n, 2, host, resident=False, pinned=False) for n in (9, 8)]
    assert [kept.at for kept in taken] == [0, 16]
    assert taken[0].slab is taken[1].slab
    assert taken[0].slab.numel() == 24
    assert slabs.take(1, 8, host, resident=False, pinned=False).slab.dtype == torch.int64
    more = slabs.take(30, 2, host, resident=False, pinned=False)
    assert (more.at, more.numel, more.slab.numel()) == (0, 30, 32)


def test_bits_on_a_device_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltachain.publish.snapshot.READ_NUMEL", 7)
    for numel in (0, 6, 7, 30):
        bits = torch.arange(numel, dtype=torch.int16)
        assert torch.equal(read(bits), bits)

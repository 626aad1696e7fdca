import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.refusals import MemoryRange, overlapping
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
from tests.support.values import present
from tests.unit.publish.chains import Attach, assert_head_is


def frozen_first(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Return a plain model whose first weight does not require a gradient."""
    model: Any = plain_model(dtype=dtype)
    model[0].weight.requires_grad_(False)
    found: nn.Sequential = model
    return found


@pytest.fixture
def quantising(store: MemoryStore) -> Iterator[Attach]:
    """Attach a publisher that quantises, or does not."""
    made: list[Publisher] = []

    def build(model: nn.Module, quantization: str | None, **settings: Any) -> Publisher:
        config = PublishConfig(url=store.url, quantization=quantization, **settings)
        made.append(Publisher(config, store=store))
        return made[-1].attach(model, assets={"config.json": b"{}"})

    yield build
    for publisher in made:
        with suppress(ConfigError):
            publisher.close()


def file_pages() -> int:
    """Return the resident bytes of this process that are mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(one.split()[1]) << 10 for one in lines if one.startswith(("RssFile", "RssShm")))


def changed_(model: nn.Module) -> None:
    with torch.no_grad():
        list(model.parameters())[-1].add_(1)


def refused(publisher: Publisher, store: MemoryStore, message: str) -> str:
    """Publish, and see the refusal: always the same, and nothing is committed. Gives its hint."""
    version = publisher.version
    for _ in range(2):
        with pytest.raises(ConfigError, match=message) as caught:
            publisher.publish()
    assert max(recompute(store)) == version
    assert caught.value.hint
    return caught.value.hint


# Memory


def resized(data: Tensor, nbytes: int) -> Tensor:
    """As offloaders do: the tensor stays, its storage goes, or a part of it."""
    data = data.clone()
    data.untyped_storage().resize_(nbytes)
    return data


OTHER_DATA: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "smaller": (
        lambda t: torch.zeros(2, 24, dtype=t.dtype),
        r"is torch.bfloat16\(2, 24\), and was",
    ),
    "empty": (lambda t: torch.zeros(0, dtype=t.dtype), r"is torch.bfloat16\(0,\), and was"),
    "freed": (lambda t: resized(t, 0), "needs 1920 bytes of memory, of which 0 are there"),
    "cut": (lambda t: resized(t, 960), "needs 1920 bytes of memory, of which 960 are there"),
    "swapped": (lambda t: t.t().contiguous().t(), "not contiguous"),
    "halved": (Tensor.half, r"is torch.float16\(40, 24\), and was torch.bfloat16\(40, 24\)"),
    "doubled": (Tensor.double, r"is torch.float64\(40, 24\), and was torch.bfloat16\(40, 24\)"),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("quantization", [None, "fp8-block"])
@pytest.mark.parametrize("other", OTHER_DATA)
def test_other_data_of_a_weight_is_refused_before_it_is_read(
    other: str, quantization: str | None, frozen: bool, store: MemoryStore, quantising: Attach
) -> None:
    model: Any = frozen_first() if frozen else plain_model()
    publisher = quantising(model, quantization)
    change, message = OTHER_DATA[other]
    model[0].weight.data = change(model[0].weight.data)
    refused(publisher, store, rf"'0.weight'.* {message}")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantization", [None, "fp8-block", "int8-row"])
def test_the_trainer_may_resize_what_was_published(
    quantization: str | None, dtype: torch.dtype, frozen: bool, quantising: Attach
) -> None:
    model: Any = frozen_first(dtype) if frozen else plain_model(dtype=dtype)
    publisher = quantising(model, quantization, dtype="BF16")
    changed_(model)
    publisher.publish().result()
    publisher.flush()
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)
        parameter.data.resize_(1000, 1000)


def test_freed_memory_that_is_back_is_followed(store: MemoryStore, attach: Attach) -> None:
    model: Any = frozen_first()
    publisher = attach(model)
    kept = [(p, p.detach().clone()) for p in model.parameters()]
    for parameter, _ in kept:
        parameter.untyped_storage().resize_(0)
    refused(publisher, store, "are there")
    for parameter, values in kept:
        parameter.untyped_storage().resize_(values.untyped_storage().nbytes())
        parameter.data.copy_(values)
    changed_(model)
    assert publisher.publish().result().version == 1
    assert_head_is(model, 1, store)


def save_halves(model: nn.Module) -> None:
    def halved(_: nn.Module, state: dict[str, Tensor], prefix: str, *__: object) -> None:
        state[f"{prefix}layer.weight"] = state[f"{prefix}layer.weight"] * 0.5

    model.register_state_dict_post_hook(halved)


ANOTHER_MODEL: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "no data": (lambda m: m.to("meta"), r"'embed\.weight' has no data \(meta device\)", ""),
    "a new buffer": (
        lambda m: m.register_buffer("scores", torch.zeros(3)),
        "'scores' was not there",
        "URL of its own",
    ),
    "a new parameter": (
        lambda m: m.register_parameter("scores", nn.Parameter(torch.zeros(3))),
        "'scores' was not there",
        "URL of its own",
    ),
    "a tied layer less": (
        lambda m: m._modules.pop("head"),
        "'head.weight' is gone",
        "URL of its own",
    ),
    "another state_dict": (
        save_halves,
        r"'layer\.weight' is not the same in the model's state_dict",
        "",
    ),
}


@pytest.mark.parametrize("change", ANOTHER_MODEL)
def test_another_model_than_was_attached_is_refused(
    change: str, store: MemoryStore, attach: Attach
) -> None:
    model = TinyModel()
    publisher = attach(model)
    do, message, hint = ANOTHER_MODEL[change]
    do(model)
    assert hint in refused(publisher, store, message)


def test_a_frozen_weight_that_moves_into_the_memory_of_a_trained_one_is_refused(
    store: MemoryStore, attach: Attach
) -> None:
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].weight.requires_grad_(False)
    publisher = attach(model)
    model[0].weight.data = model[1].weight.data
    refused(publisher, store, "'0.weight' was frozen .* in the memory of a weight that is trained")


def test_an_export_whose_tensor_has_no_memory_is_refused(
    store: MemoryStore, attach: Attach
) -> None:
    tensors = {"a": torch.ones(4, 6), "b": torch.ones(3)}
    publisher = attach(tensors.items)
    tensors["a"] = torch.ones(4, 6)
    tensors["a"].untyped_storage().resize_(0)
    refused(publisher, store, "'a' needs 96 bytes of memory")


def test_an_anchor_of_freed_frozen_weights_is_refused(attach: Attach) -> None:
    model: Any = frozen_first()
    publisher = attach(model)
    model[0].weight.untyped_storage().resize_(0)
    session = present(publisher._session)
    with pytest.raises(ConfigError, match=r"'0.weight' needs 1920 bytes"):
        session.add_anchor(session.begin_anchor(), topic="")


# Names and ties


def test_a_head_that_is_untied_is_refused(store: MemoryStore, attach: Attach) -> None:
    model: Any = TinyModel()
    publisher = attach(model)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    hint = refused(publisher, store, "'head.weight' and 'embed.weight' were one tensor")
    assert "tie_weights" in hint
    model.head.weight = model.embed.weight
    changed_(model)
    assert publisher.publish().result().version == 1


@pytest.mark.parametrize("requires_grad", [True, False])
def test_tied_names_may_be_two_tensors_of_one_memory(
    store: MemoryStore, attach: Attach, *, requires_grad: bool
) -> None:
    """One of which may be frozen, and is compared with the other."""
    model: Any = TinyModel()
    if not requires_grad:
        model.head.weight = nn.Parameter(model.embed.weight.data, requires_grad=False)
    publisher = attach(model)
    if requires_grad:
        model.head.weight = nn.Parameter(model.embed.weight.detach())
    with torch.no_grad():
        model.embed.weight.add_(1)
    publisher.publish().result()
    assert_head_is(model, 1, store)


def test_a_buffer_that_is_not_saved_may_come(attach: Attach) -> None:
    model = plain_model()
    publisher = attach(model)
    model.register_buffer("scores", torch.zeros(3), persistent=False)
    changed_(model)
    assert publisher.publish().result().version == 1


# Frozen weights


@torch.no_grad()
def written(model: Any, values: Tensor) -> None:
    model[0].weight.copy_(values)


def assigned(model: Any, values: Tensor) -> None:
    model[0].weight = nn.Parameter(values, requires_grad=False)


def given(model: Any, values: Tensor) -> None:
    model[0].weight.data = values


def copied(model: Any, values: Tensor) -> None:
    """As target networks are averaged: torch counts no write."""
    model[0].weight.data.copy_(values)


def loaded(model: Any, values: Tensor) -> None:
    model.load_state_dict(model.state_dict() | {"0.weight": values}, assign=True)
    model[0].weight.requires_grad_(False)


@pytest.mark.parametrize("quantization", [None, "fp8-block"])
@pytest.mark.parametrize("replace", [written, assigned, given, loaded, copied])
def test_a_frozen_weight_is_replaced(
    replace: Callable[[Any, Tensor], None],
    quantization: str | None,
    store: MemoryStore,
    quantising: Attach,
) -> None:
    """By equal bits as often as one likes; by others never, unless it is quantised: compared."""
    model: Any = frozen_first()
    publisher = quantising(model, quantization)
    values = model[0].weight.detach().clone()
    for _ in range(3):
        replace(model, values.clone())
        changed_(model)
        publisher.publish().result()
    replace(model, values + 1)
    if quantization:
        assert publisher.publish().result().nnz > 0
        return
    hint = refused(publisher, store, "'0.weight' did not require a gradient .* changed since")
    assert "state_dict" in hint
    replace(model, values)
    changed_(model)
    assert publisher.publish().result().version == 4


@pytest.mark.parametrize("seed", range(50))
def test_shared_memory_is_found_wherever_it_is(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(end: int) -> int:
        return int(torch.randint(end, (), generator=draw))

    memory = {}
    for name in "abcdefgh":
        start = number(30)
        memory[name] = MemoryRange("cpu" if number(2) else "cuda:0", start, start + number(6))
    frozen = {name for name in memory if number(2)}

    def meet(one: MemoryRange, other: MemoryRange) -> bool:
        both = max(one.start, other.start) < min(one.stop, other.stop)
        return one.device == other.device and both

    expected = {
        name
        for name in frozen
        if any(meet(memory[name], memory[other]) for other in memory.keys() - frozen)
    }
    assert overlapping(memory, frozen) == expected


# Subclasses


def test_a_tensor_subclass_is_refused() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    with pytest.raises(ConfigError, match="'weight' is a TwoTensor, a tensor subclass") as caught:
        collect_weights(module)
    assert "dequantize" in caught.value.hint


def test_a_model_that_is_only_looked_at_is_not_kept() -> None:
    source = collect_weights(plain_model())
    assert all(weight.tensor.is_meta for weight in source.weights)


# Snapshots


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


def test_a_vector_without_a_gradient_is_compared(store: MemoryStore, attach: Attach) -> None:
    """As biases of experts, which trainers move by hand."""
    model: Any = plain_model()
    model[1].bias.requires_grad_(False)
    publisher = attach(model)
    model[1].bias.data += 1
    publisher.publish().result()
    assert_head_is(model, 1, store)


@pytest.mark.parametrize("on_device", [False, True])
def test_inference_tensors_and_empty_ones_have_no_changes(*, on_device: bool) -> None:
    with torch.inference_mode():
        model = TinyModel()
    assert listed(snapshot_of(model).diff_()) == {}
    empty = nn.Module()
    empty.weight = nn.Parameter(torch.empty(3, 0))
    assert listed(snapshot_of(empty, on_device=on_device).diff_()) == {}


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


@pytest.mark.parametrize("where", ["host", "device", "disk"])
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


def test_a_publisher_says_that_a_snapshot_cannot_be_on_the_device(tmp_path: Path) -> None:
    config = PublishConfig(url=str(tmp_path), snapshot="device")
    with pytest.raises(ConfigError, match="all weights are compared on the host"):
        Publisher(config).attach(plain_model())


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("where", "copies"), [("host", 0), ("disk", 1)])
def test_a_snapshot_on_a_disk_is_in_pages_of_a_file(
    where: SnapshotPlace, copies: int, on_device: bool
) -> None:
    model = nn.ParameterDict({str(n): torch.ones(1 << 20) for n in range(32)})
    source = collect_weights(model, dtype="BF16")
    before = file_pages()
    snapshot = Snapshot(source, where=where, on_device=on_device)
    assert abs((file_pages() - before) / (32 << 21) - copies) < 0.2
    with torch.no_grad():
        model["7"][5] = 2
    assert {n: found for n, (found, *_) in listed(snapshot.diff_()).items()} == {"7": [5]}
    assert not listed(snapshot.diff_())


def test_a_snapshot_in_a_file_needs_room_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(ConfigError, match="File too large") as raised:
            Snapshot(collect_weights(nn.Linear(256, 256)), where="disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "bytes are missing (ulimit -f)" in str(raised.value.hint)
    assert not list(tmp_path.iterdir())


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

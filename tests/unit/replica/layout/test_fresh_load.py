from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deltachain import errors
from deltachain.checkpoint import Checkpoint
from deltachain.delta import TensorDelta
from deltachain.replica import rank
from deltachain.replica.layout import fresh_load
from deltachain.replica.layout.classes import agree
from deltachain.replica.layout.discover import discover
from deltachain.replica.layout.load_recorder import Recording, live_tensors, record
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.layout.model_state import COLUMNS, probing_rows
from deltachain.replica.placements import Window
from deltachain.replica.rank import Rank
from deltachain.types import TensorSpec
from tests.support.engine import FakeModel, Sharding, put, save, trained
from tests.support.spools import spool_of
from tests.unit.replica import replicas
from tests.unit.replica.layout.coded import LAYERS, SHAPE, Coded, CodedEngine, Quantise, quantise
from tests.unit.replica.layout.loaders import PLANNED, REFUSED, SIZE, Loader, OneLayer
from tests.unit.replica.replicas import Followed

SPEC = TensorSpec("w", "BF16", SIZE)
OTHER = TensorSpec("v", "BF16", SIZE)


def run(model: OneLayer, *specs: TensorSpec) -> Recording:
    """Record, and see that every live bit is what it was."""
    recording = record(model.load, specs or [SPEC], model.modules())
    assert all(bool((tensor == 7).all()) for tensor in model.tensors().values()), "it was written"
    return recording


def loaded(loader: Loader, full: Tensor) -> dict[str, Tensor]:
    """What the loader does when it is let through."""
    model = OneLayer(loader)
    with torch.no_grad():
        loader(model, full)
    return {name: tensor.detach() for name, tensor in model.tensors().items()}


@pytest.mark.parametrize("style", PLANNED)
def test_views_are_planned_and_lead_where_the_loader_copies(style: str) -> None:
    model = OneLayer(PLANNED[style])
    recording = run(model)
    assert not recording.reasons
    assert not recording.raised
    full = torch.arange(24).to(torch.bfloat16)
    bits = full.view(torch.int16).numpy().view("<u2")
    for place in recording.places["w"]:
        view: Any = place.view
        view[...] = place.cut(bits)
    truth = loaded(PLANNED[style], full.view(SIZE))
    rows = 3 if style == "padded" else 4  # what is filled comes from no checkpoint
    for name, tensor in model.tensors().items():
        assert torch.equal(tensor[:rows], truth[name][:rows])


@pytest.mark.parametrize("style", REFUSED)
def test_anything_else_gets_a_reason_and_no_place(style: str) -> None:
    loader, why = REFUSED[style]
    recording = run(OneLayer(loader))
    assert not recording.places.get("w")
    assert why in recording.reasons["w"]
    assert recording.raised == ({"w"} if "raised" in recording.reasons["w"] else frozenset())


@pytest.mark.parametrize("style", REFUSED)
def test_one_awkward_tensor_does_not_spoil_the_others(style: str) -> None:
    loader, _ = REFUSED[style]

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            (model.b.copy_ if name == "v" else lambda w: loader(model, w))(tensor)

    model = OneLayer(loader)
    recording = record(load, [OTHER, SPEC], model.modules())
    assert [place.window for place in recording.places["v"]] == [Window(0, (24,), (1,))]
    assert "w" in recording.reasons
    assert "w" not in recording.places


def test_what_a_rank_does_not_load_has_neither_place_nor_reason() -> None:
    recording = run(OneLayer(lambda _, __: None))
    assert recording.places["w"] == ()
    assert not recording.reasons


def test_a_cast_is_a_place_of_another_dtype() -> None:
    """What becomes of it is for those to say who read it back."""
    model = OneLayer(PLANNED["copy"], torch.float32)
    (place,) = run(model).places["w"]
    assert place.live.dtype == torch.float32


def test_a_loader_is_called_once_if_everything_is_a_view() -> None:
    calls: list[int] = []

    def load(tensors: Any) -> None:
        calls.append(len(tensors))
        for _, tensor in tensors:
            model.p.data.copy_(tensor)

    model = OneLayer(PLANNED["copy"])
    record(load, [SPEC, OTHER], model.modules())
    assert calls == [2]
    model = OneLayer(lambda m, w: m.p.data.copy_(w.clone()))
    calls.clear()

    def load_clones(tensors: Any) -> None:
        calls.append(len(tensors))
        model.load(tensors)

    record(load_clones, [SPEC, OTHER], model.modules())
    assert calls == [2], "what a clone was made from is known"


def test_two_of_a_kind_that_cannot_be_loaded_tell_of_the_others() -> None:
    calls: list[int] = []

    def load(tensors: Any) -> None:
        calls.append(len(tensors))
        for name, tensor in tensors:
            if name.startswith("packed"):
                raise AttributeError(name)
            model.p.data.copy_(tensor)

    model = OneLayer(PLANNED["copy"])
    specs = [
        TensorSpec(f"{kind}.{n}", "BF16", SIZE) for kind in ("packed", "raw") for n in range(9)
    ]
    recording = record(load, specs, model.modules())
    assert recording.raised == {f"packed.{number}" for number in range(9)}
    assert {name for name, places in recording.places.items() if places} == {
        f"raw.{number}" for number in range(9)
    }
    assert calls == [18, 1, 1, 1, 1, 7], "together once, two of each kind, the rest of the raw"


def replace_parameter(model: OneLayer, _: Tensor) -> None:
    model.p = nn.Parameter(torch.full(SIZE, 7, dtype=torch.bfloat16), requires_grad=False)


def replace_data(model: OneLayer, _: Tensor) -> None:
    model.p.data = model.p.data.clone()


def remove_parameter(model: OneLayer, _: Tensor) -> None:
    del model.p


def register_late(model: OneLayer, w: Tensor) -> None:
    model.late = nn.Parameter(torch.empty(SIZE), requires_grad=False)
    model.late.data.copy_(w)


@pytest.mark.parametrize(
    "loader", [replace_parameter, replace_data, remove_parameter, register_late]
)
def test_a_dry_run_leaves_every_member_as_it_was(loader: Loader) -> None:
    model = OneLayer(loader)
    before = {**vars(model)}, dict(model._parameters), model.p, model.p.data_ptr()
    record(model.load, [SPEC], model.modules())
    assert ({**vars(model)}, dict(model._parameters), model.p, model.p.data_ptr()) == before


def test_tensors_that_a_loader_joins_are_known_to_belong_together() -> None:
    held: dict[str, Tensor] = {}

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            held[name] = tensor
            if len(held) == 2:
                model.p.data.copy_(torch.cat([held.pop("v")[:2], held.pop("w")[:2]]))

    model = OneLayer(lambda _, __: None)
    recording = record(load, [SPEC, OTHER], model.modules())
    assert recording.together == (frozenset(["v", "w"]),)
    assert recording.reasons.keys() == {"v", "w"}


def test_live_tensors_are_parameters_buffers_and_attributes_with_elements() -> None:
    model = OneLayer(PLANNED["copy"])
    model.extra = torch.zeros(2)
    model.empty = nn.Parameter(torch.zeros(0))
    model.absent = torch.zeros(2, device="meta")
    outer = nn.Sequential(model)
    assert set(live_tensors(outer)) == {"0.p", "0.b", "0.extra"}


def test_elements_that_no_tensor_fills_have_no_place(tmp_path: Path) -> None:
    """Rows that pad a vocabulary, and none of them a tensor's."""
    shape = Sharding(tp=4)
    engine = FakeModel(shape, 3, save(trained(shape), tmp_path))
    spec = TensorSpec("embed.weight", "BF16", (50, 16))
    recording = record(engine.load, [spec], engine.modules())
    (place,) = recording.places["embed.weight"]
    assert place.window == Window(42 * 16, (8 * 16,), (1,))
    assert np.shares_memory(
        np.asarray(place.view), engine.root.get_parameter("embed.weight").view(torch.int16).numpy()
    )


def failing(folder: Path, write: Callable[[Tensor, Tensor], object]) -> tuple[OneLayer, Tensor]:
    """An engine that can reload what it holds, and fails with other bits when it has written."""
    first = torch.randn(SIZE).to(torch.bfloat16)
    save_file({"w": first}, folder / "model.safetensors")
    model = OneLayer(PLANNED["copy"])
    model.checkpoint = folder
    model.load([("w", first.clone())])
    model.pack()
    assert model.kernel is not None
    memory = model.kernel()

    def reload(model: OneLayer, w: Tensor) -> None:
        is_first = torch.equal(w, first)
        model.p.data.copy_(w)
        write(memory, w)
        if not is_first:
            raise RuntimeError("a kernel is missing")

    model.reloader = reload
    return model, memory


def source_of(model: OneLayer) -> LoadedCheckpoint:
    checkpoint = Checkpoint(model.checkpoint)
    return LoadedCheckpoint(checkpoint, checkpoint.specs, {})


def test_a_refused_reload_is_undone_by_the_engine_itself(tmp_path: Path) -> None:
    model, memory = failing(tmp_path, lambda memory, w: memory.copy_(w))
    before = memory.clone()
    assert discover(model, source_of(model)).classes == {"w": "refused"}
    assert model.kernel is not None
    assert model.kernel() is memory
    assert torch.equal(memory, before)


def test_an_engine_that_cannot_undo_it_must_be_restarted(tmp_path: Path) -> None:
    def spoil(memory: Tensor, w: Tensor) -> None:
        if not torch.equal(w, memory):
            memory.fill_(7)

    model, _ = failing(tmp_path, spoil)
    with pytest.raises(errors.EngineDamagedError, match="restart the engine"):
        discover(model, source_of(model))


HEADS = ("mtp.0.weight", "mtp.1.weight")

Make = Callable[..., Followed]


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes an engine that follows a model with heads which no layer of the engine is made for."""

    def with_heads(shape: Sharding) -> nn.Module:
        model = trained(shape)
        for name in HEADS:
            put(model, name, nn.Parameter(torch.randn(6, 4).to(torch.bfloat16)))
        return model

    monkeypatch.setattr(replicas, "trained", with_heads)
    return lambda **shape: Followed(Sharding(**shape), tmp_path)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_replica_follows_a_model_of_which_it_uses_a_part(followed: Make, tp: int) -> None:
    scene = followed(tp=tp)
    try:
        for version in range(1, 5):
            scene.publish(version)
            scene.subscriber.update()
            assert scene.subscriber.version == version
            assert scene.holds(version)
        assert scene.target.classes()["unused"] == {"tensors": 2, "nbytes": 96}
        assert "nothing that the engine holds follows it" in scene.target.on_host()[HEADS[0]]
        assert scene.subscriber.scrub(), "what nobody keeps is in the digest all the same"
        assert scene.subscriber.rollback(3).version == 3
        assert scene.holds(3)
        assert scene.subscriber.scrub()
    finally:
        scene.close()


def test_one_who_cannot_know_what_they_hold_joins_from_nothing(followed: Make) -> None:
    """The engine holds version 1, its files say version 0: a second leader takes it over."""
    scene = followed()
    try:
        scene.publish(1)
        scene.subscriber.update()
        scene.publish(2)
        second = scene.subscribe()
        receipt = second.update()
        assert receipt is not None
        assert receipt.previous is None
        assert second.version == 2
        assert scene.holds(2)
        assert second.scrub()
        second.close()
    finally:
        scene.close()


@pytest.mark.full
def test_a_tensor_that_something_is_derived_from_is_not_unused(
    followed: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = FakeModel.load

    def load_and_derive(model: FakeModel, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        given = dict(tensors)
        done = load(model, given.items())
        if HEADS[1] in given and not given[HEADS[1]].is_meta:
            model.root.scale = given[HEADS[1]].float().sum()
        return done

    monkeypatch.setattr(FakeModel, "load", load_and_derive)
    scene = followed()
    try:
        scene.publish(1, share=1.0)
        scene.subscriber.update()
        classes = scene.target.classes()
        assert classes["unused"]["tensors"] == classes["reloaded"]["tensors"] == 1
        assert "derives scale from it" in scene.target.on_host()[HEADS[1]]
        wanted = scene.truth[1][HEADS[1]].float().sum()
        live = scene.engine.models[0].tensors()["scale"]
        assert torch.equal(live, wanted)
        assert scene.subscriber.scrub()
    finally:
        scene.close()


BUDGET: Final = 1 << 30


class Bench:
    """A rank of an engine that quantises, with a staged version in which some layers change."""

    def __init__(
        self,
        folder: Path,
        *,
        hides: bool = False,
        fails: bool = False,
        changed: tuple[str, ...] = LAYERS,
    ) -> None:
        torch.manual_seed(0)
        old = {f"{name}.weight": torch.randn(SHAPE).to(torch.bfloat16) for name in LAYERS}
        other = {name: torch.randn(SHAPE).to(torch.bfloat16) for name in old}
        new = old | {f"{name}.weight": other[f"{name}.weight"] for name in changed}
        (folder / "old").mkdir()
        save_file(old, folder / "old" / "model.safetensors")
        self.before = Checkpoint(folder / "old")
        self.model = CodedEngine(folder / "old", old, hides=hides)
        self.model.fails = fails
        self.fresh = CodedEngine(folder / "old", new, hides=hides)
        self.old = self.state()
        self.rank = Rank(self.model, self.before.specs.values(), {})
        self.agreement = agree(self.before.specs.values(), [self.rank.report()])
        holders = {name: labels[0] for name, labels in self.agreement.holders.items()}
        self.rank.agree(self.agreement.classes, holders)
        names = [f"{name}.weight" for name in changed]
        self.spool = spool_of(folder / "spool", [self._delta(n, new[n]) for n in names])
        self.restage()

    def restage(self) -> None:
        self.rank.stage(1, self.spool.folder, BUDGET)
        self.model.apart.clear()

    def _delta(self, name: str, tensor: Tensor) -> TensorDelta:
        was = self.before.bits(name)
        bits = tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1)
        at = np.flatnonzero(was != bits)
        return TensorDelta(spec=self.before.specs[name], indices=at, values=bits[at] - was[at])

    def state(self, engine: CodedEngine | None = None) -> dict[str, Tensor]:
        """What an engine holds and computes; that of the rank by default."""
        engine = engine or self.model
        outputs = engine.compute(frozenset(LAYERS))
        numbers = {f"{n}.largest": torch.tensor(engine.get_submodule(n).largest) for n in "ab"}
        held = {name: tensor.detach().clone() for name, tensor in engine.tensors().items()}
        return held | numbers | {f"{name}()": output for name, output in outputs.items()}

    def holds(self, wanted: dict[str, Tensor]) -> bool:
        """Whether the rank's engine is in a state."""
        found = self.state()
        return found.keys() == wanted.keys() and all(
            torch.equal(found[name], tensor) for name, tensor in wanted.items()
        )


def stale_scale(layer: Coded, raw: Tensor) -> None:
    old = layer.scale.data.clone()
    quantise(layer, raw)
    layer.scale.data.copy_(old)


def stale_row(layer: Coded, raw: Tensor) -> None:
    old = (layer.kernel.codes if layer.kernel else layer.weight.data)[3].clone()
    quantise(layer, raw)
    layer.weight.data[3] = old


def stale_number(layer: Coded, raw: Tensor) -> None:
    old = layer.largest
    quantise(layer, raw)
    layer.largest = old


def wrong(layer: Coded, raw: Tensor) -> None:
    quantise(layer, raw)
    layer.weight.data[3, 0] ^= 1


def only(model: CodedEngine, name: str, how: Quantise) -> Quantise:
    """That of one layer wrong, and that of all others right."""
    layer = model.get_submodule(name)
    return lambda one, raw: (how if one is layer else quantise)(one, raw)


@pytest.mark.parametrize(
    ("stale", "hides", "why"),
    [
        (stale_scale, False, "scale differs"),
        (stale_row, False, "weight differs"),
        (stale_number, False, r"largest is \d.*, not \d"),
        (stale_row, True, "it computes something else"),
    ],
)
def test_what_a_reload_left_stale_is_refused_and_taken_back(
    tmp_path: Path, stale: Quantise, hides: bool, why: str
) -> None:
    bench = Bench(tmp_path, hides=hides)
    assert set(bench.agreement.classes.values()) == {"reloaded"}
    bench.model.quantise = only(bench.model, "b", stale)
    with pytest.raises(
        errors.PartialApplyError, match=f"b is not what a fresh load .* gives: {why}"
    ):
        bench.rank.swap(1, 1, back=False)
    assert bench.holds(bench.old)
    bench.model.quantise = quantise
    bench.rank.swap(1, 1, back=False)
    assert bench.holds(bench.state(bench.fresh))


@pytest.mark.parametrize("fails", [True, False])
def test_beside_other_ranks_the_old_bits_are_loaded_when_all_load(
    tmp_path: Path, *, fails: bool
) -> None:
    bench = Bench(tmp_path)
    bench.rank.agree(bench.agreement.classes, bench.rank._holders, alone=False)
    bench.restage()
    bench.model.quantise = only(bench.model, "b", stale_scale)
    with pytest.raises(errors.UnfinishedSwapError, match="could not load version 1: b is not"):
        bench.rank.swap(1, 1, back=False)
    loaded = len(bench.model.apart)
    if fails:
        bench.model.quantise = only(bench.model, "b", wrong)
        with pytest.raises(errors.PoisonedError, match="neither version 1 nor the old bits"):
            bench.rank.swap(1, 1, back=True)
        return
    bench.model.quantise = quantise
    assert bench.rank.swap(1, 0, back=True) > 0
    assert len(bench.model.apart) == loaded + 2, "it is proven"
    assert bench.holds(bench.old)
    assert bench.rank.swap(1, 0, back=True) == 0
    bench.rank.swap(1, 1, back=False)
    assert bench.holds(bench.state(bench.fresh))


def test_a_rank_that_cannot_write_loads_as_often_as_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.rank.agree(bench.agreement.classes, bench.rank._holders, alone=False)
    bench.restage()

    def lost(*_: object) -> None:
        raise errors.PartialApplyError("device lost", version=1)

    with monkeypatch.context() as patched:
        patched.setattr(rank, "write_all", lost)
        with pytest.raises(errors.UnfinishedSwapError, match="device lost"):
            bench.rank.swap(1, 1, back=False)
    assert bench.model.apart == ["a", "b"]
    bench.rank.swap(1, 1, back=True)
    assert bench.model.apart == ["a", "b"] * 2
    assert bench.holds(bench.old)
    bench.rank.swap(1, 1, back=False)
    assert bench.holds(bench.state(bench.fresh))


def test_layers_that_another_rank_cannot_compare_are_not_compared(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.agreement.compared == {"a.weight", "b.weight"}
    bench.rank.agree(bench.agreement.classes, bench.rank._holders, compared={"b.weight"})
    bench.restage()
    bench.rank.swap(1, 1, back=False)
    assert bench.model.apart == ["b"]
    assert bench.holds(bench.state(bench.fresh))


def test_layers_that_nobody_can_look_into_are_not_called_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CodedEngine, "probe", lambda *_: None)
    bench = Bench(tmp_path, hides=True)
    assert not bench.agreement.compared
    assert "cannot be tried by itself" in bench.agreement.reasons["a.weight"]


def test_old_bits_that_cannot_be_proven_are_not_called_old_bits(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.model.quantise = only(bench.model, "b", wrong)
    with pytest.raises(errors.PoisonedError, match="neither version 1 nor the old bits"):
        bench.rank.swap(1, 1, back=False)


def test_only_quantised_layers_that_changed_are_compared(tmp_path: Path) -> None:
    bench = Bench(tmp_path, changed=("b", "plain"))
    bench.rank.swap(1, 1, back=False)
    assert bench.model.apart == ["b"]
    assert bench.holds(bench.state(bench.fresh))


def test_every_group_is_loaded_even_after_one_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may wait for what this one exchanges with them while it quantises."""
    bench = Bench(tmp_path)
    monkeypatch.setattr(fresh_load, "TOGETHER", 1)
    bench.model.quantise = only(bench.model, "a", stale_scale)
    with pytest.raises(errors.PartialApplyError, match="a is not what"):
        bench.rank.swap(1, 1, back=False)
    assert bench.model.apart == ["a", "b"] * 2, "the new bits, and the old ones"


@pytest.mark.parametrize(("limit", "loads"), [(1, [1, 1]), (1 << 20, [2])])
def test_groups_are_loaded_together_up_to_a_limit(
    tmp_path: Path, limit: int, loads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    apart, seen = bench.model.loaded_apart, list[int]()

    def counted(layers: frozenset[str], tensors: Any) -> Any:
        seen.append(len(layers))
        return apart(layers, tensors)

    monkeypatch.setattr(bench.model, "loaded_apart", counted)
    monkeypatch.setattr(fresh_load, "TOGETHER", limit)
    bench.rank.swap(1, 1, back=False)
    assert seen == loads


def test_copies_that_are_quantised_wrongly_are_loaded_no_more(tmp_path: Path) -> None:
    """A scrub loads what is held again, and finds that a layer does not become what it was."""
    bench = Bench(tmp_path)
    assert bench.rank.loads_the_same()
    bench.model.quantise = only(bench.model, "b", wrong)
    bench.rank._copies.load(bench.rank._attached, set(bench.before.specs))
    assert not bench.rank.loads_the_same()


def test_an_engine_that_loads_nothing_apart_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fails=True)
    assert set(bench.agreement.classes.values()) == {"reloaded"}
    assert "not compared with a fresh load after a swap" in bench.agreement.reasons["a.weight"]
    assert "gives no way to do that" in bench.agreement.reasons["a.weight"]
    bench.rank.swap(1, 1, back=False)
    assert bench.holds(bench.state(bench.fresh))


def test_probing_rows_show_columns() -> None:
    weight = torch.randn(SHAPE)
    row = torch.ones(1, SHAPE[1])
    rows = probing_rows(row, 7)
    assert rows.shape == (1 + COLUMNS, SHAPE[1])
    assert torch.equal(rows[:1], row)
    assert torch.equal(rows[1:].sum(1), torch.ones(COLUMNS))
    chosen = rows[1:].argmax(1)
    assert len(set(chosen.tolist())) == COLUMNS
    assert torch.equal(rows[1:] @ weight.t(), weight[:, chosen].t())
    assert torch.equal(rows, probing_rows(row, 7))
    assert not torch.equal(rows, probing_rows(row, 8))
    assert probing_rows(torch.ones(1, 3), 0).shape == (4, 3)

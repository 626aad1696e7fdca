"""One rank on a device: staged while it computes, swapped under its graphs, and taken back.

Needs neither pytest nor an engine; ``cpu`` tries the checks themselves, without graphs.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.delta import TensorDelta, changes
from deltachain.errors import ConfigError
from deltachain.publish.model.source import ModelTensors, collect_weights
from deltachain.publish.quantise.settings import RECIPES
from deltachain.publish.quantise.tensors import quantise
from deltachain.publish.ranks.collectives import Ranks
from deltachain.publish.snapshot import Snapshot, SnapshotPlace
from deltachain.publish.wire_form import Diff
from deltachain.replica.layout.classes import agree
from deltachain.replica.rank import Rank
from deltachain.subscribe.proof import Effect
from deltachain.types import StateDigest
from tests.support.engine import FakeModel, Sharding, full_of, save, trained
from tests.support.models import plain_model, train_
from tests.support.spools import spool_of


def snapshot_checks(where: str) -> Iterator[tuple[str, Callable[[], None]]]:
    places: tuple[SnapshotPlace, ...] = ("host", "device")
    rounding = [name for name in sorted(RECIPES) if RECIPES.chosen(name).arithmetic.rounding]
    libraries = {name: RECIPES.chosen(name).library.replace("-", "_") for name in rounding}
    recipes = [name for name, library in libraries.items() if find_spec(library)]
    for place, dtype in product(places, (torch.bfloat16, torch.float32)):
        kind = f"{place}.{str(dtype).removeprefix('torch.')}"
        yield f"snapshot.{kind}", partial(check_snapshot, where, place, dtype)
        for recipe in recipes:
            check = partial(check_quantised, where, place, dtype, recipe)
            yield f"snapshot.{recipe}.{kind}", check


def same_changes(ours: Snapshot, host: Snapshot) -> Diff:
    found, expected = ours.diff_(), host.diff_()
    assert found.live.keys() == expected.live.keys() != set()
    for name, changed in expected.live.items():
        for one, other in zip(changed, found.live[name], strict=True):
            np.testing.assert_array_equal(one, other)
    return found


def check_snapshot(where: str, place: SnapshotPlace, dtype: torch.dtype) -> None:
    host_model, model = plain_model(dtype=dtype), plain_model(dtype=dtype).to(where)
    host = Snapshot(collect_weights(host_model, dtype="BF16"))
    on_device = torch.device(where).type == "cpu"
    ours = Snapshot(collect_weights(model, dtype="BF16"), where=place, on_device=on_device)
    weights = collect_weights(model, dtype="BF16").weights
    assert ours.state == host.state
    for seed in range(3):
        train_(host_model, seed)
        model.load_state_dict(host_model.state_dict())
        found = same_changes(ours, host)
        ours.restore(found)
        ours.redo(found)
        assert ours.state == host.state
        for weight in weights:
            np.testing.assert_array_equal(ours.bits(weight), host.bits(weight))


def check_quantised(where: str, place: SnapshotPlace, dtype: torch.dtype, recipe: str) -> None:
    torch.manual_seed(1)
    layers = nn.ModuleDict({"a": nn.Linear(300, 260), "b": nn.Linear(260, 130, bias=False)})
    model, host_model = layers.to(where, dtype), copy.deepcopy(layers).to("cpu", dtype)
    host = Snapshot(quantised_tensors(host_model, recipe))
    on_device = torch.device(where).type == "cpu"
    ours = Snapshot(quantised_tensors(model, recipe), where=place, on_device=on_device)
    assert ours.state == host.state
    for seed in range(2):
        train_(host_model, seed)
        model.load_state_dict(host_model.state_dict())
        same_changes(ours, host)
        assert ours.state == host.state
    with torch.no_grad():
        dict(model.named_parameters())["b.weight"][129, 259] = torch.nan
        dict(model.named_parameters())["a.weight"].mul_(2)
    try:
        ours.diff_()
    except ConfigError:
        assert ours.state == host.state
    else:
        raise AssertionError("a weight that is not finite was published")


def quantised_tensors(model: nn.Module, recipe: str) -> ModelTensors:
    source = collect_weights(model, dtype="BF16")
    made = quantise(source, {"a.weight", "b.weight"}, RECIPES.chosen(recipe), Ranks.alone())
    made.agree("begin")
    return made


BUDGET = 1 << 30


class Graph:
    def __init__(self, model: FakeModel, tokens: Tensor) -> None:
        self._model, self._tokens = model, tokens
        self._graph: torch.cuda.CUDAGraph | None = None
        if tokens.is_cuda:
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._model.forward(self._tokens)  # libraries set themselves up on their first call
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = self._model.forward(self._tokens)

    def replay(self) -> Tensor:
        if self._graph is None:
            return self._model.forward(self._tokens).cpu()
        self._graph.replay()
        return self._output.cpu()


@dataclass
class Bench:
    where: str
    kind: str
    folder: Path
    shape: Sharding = field(default_factory=Sharding)

    def __post_init__(self) -> None:
        model = trained(self.shape)
        self.old = full_of(model)
        self.before = Checkpoint(save(model, self.folder / "old"))
        for seed in range(4):
            train_(model, seed, share=0.05)
        self.new = full_of(model)
        self.after = Checkpoint(save(model, self.folder / "new"))
        self.model = FakeModel(self.shape, 0, self.folder / "old", self.where)
        self.rank = Rank(self.model, self.before.specs.values(), {"head.weight": "embed.weight"})
        agreement = agree(self.before.specs.values(), [self.rank.report()])
        expected = {"in_place", *(["reloaded"] if "shadow" in self.shape.odd else [])}
        assert set(agreement.classes.values()) == expected, agreement.reasons
        holders = {name: labels[0] for name, labels in agreement.holders.items()}
        self.rank.agree(agreement.classes, holders)
        whole = self.kind == "dense"
        old = self.before.bits if self.kind == "max" else None
        self.spool = spool_of(self.folder / "spool", self._deltas(), from_nothing=whole, old=old)
        self.tokens = torch.arange(7, device=self.where)
        self.addresses = {n: t.data_ptr() for n, t in self.model.tensors().items()}

    def _deltas(self) -> Iterator[TensorDelta]:
        for name, spec in self.before.specs.items():
            step = changes(spec, self.before.bits(name), self.after.bits(name))
            if self.kind == "dense":
                step = TensorDelta.dense(spec, self.after.bits(name))
            elif self.kind == "mixed" and step.indices is not None:
                mask = np.arange(step.nnz) % 2 == 0
                values = np.where(mask, self.after.bits(name)[step.indices], step.values)
                step = TensorDelta(spec=spec, indices=step.indices, values=values, absolute=mask)
            yield step

    def state(self) -> StateDigest:
        return sum(self.rank.state().values(), StateDigest())

    def stage(self, ticket: int, budget: int = BUDGET) -> Effect:
        staged = self.rank.stage(ticket, self.spool.folder, budget)
        return sum(staged.effects.values(), Effect())


def check_digest(bench: Bench) -> None:
    assert bench.state() == bench.before.state(bench.before.specs)


def check_stage_beside_a_graph(bench: Bench) -> None:
    graph = Graph(bench.model, bench.tokens)
    output = graph.replay()
    with ThreadPoolExecutor(1) as pool:
        staging = pool.submit(bench.stage, 1)
        while not staging.done():
            assert torch.equal(graph.replay(), output), "staging changed what is computed"
        effect = staging.result()
    assert bench.model.holds(bench.old)
    state = bench.before.state(bench.before.specs) + effect.change
    assert state == bench.after.state(bench.after.specs)
    if bench.kind == "dense":
        assert effect.written == state


def check_swap_under_a_graph(bench: Bench) -> None:
    graph = Graph(bench.model, bench.tokens)
    fresh = FakeModel(bench.shape, 0, bench.folder / "new", bench.where)
    old, new = graph.replay(), Graph(fresh, bench.tokens).replay()
    assert not torch.equal(old, new)
    bench.stage(1)
    bench.rank.swap(1, 1, back=False)
    assert bench.model.holds(bench.new)
    assert torch.equal(graph.replay(), new)
    assert bench.state() == bench.after.state(bench.after.specs)
    bench.rank.swap(1, 0, back=True)
    assert bench.model.holds(bench.old)
    assert torch.equal(graph.replay(), old)
    assert {n: t.data_ptr() for n, t in bench.model.tensors().items()} == bench.addresses


def check_swap_without_a_budget(bench: Bench) -> None:
    """What does not fit is read from the spool again while it is written."""
    graph = Graph(bench.model, bench.tokens)
    bench.stage(1, budget=0)
    assert not bench.rank.staged[1].placed
    bench.spool.close()
    bench.rank.swap(1, 1, back=False)
    assert bench.model.holds(bench.new)
    fresh = FakeModel(bench.shape, 0, bench.folder / "new", bench.where)
    assert torch.equal(graph.replay(), Graph(fresh, bench.tokens).replay())


CHECKS: tuple[Callable[[Bench], None], ...] = (
    check_digest,
    check_stage_beside_a_graph,
    check_swap_under_a_graph,
    check_swap_without_a_budget,
)

KINDS = ("step", "mixed", "dense", "max")


def checks(where: str) -> Iterator[tuple[str, Callable[[], None]]]:
    for kind, check in product(KINDS, CHECKS):
        yield f"{kind}.{check.__name__}", partial(_run, where, kind, check)


def _run(where: str, kind: str, check: Callable[[Bench], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(Bench(where, kind, Path(folder)))

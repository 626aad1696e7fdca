import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltachain import errors
from deltachain.kernels import host, torch_kernels
from deltachain.publish import Publisher
from deltachain.subscribe import Subscriber, TensorTarget
from deltachain.subscribe.receipt import Staged
from deltachain.subscribe.targets import base as target_module
from deltachain.subscribe.targets import tensor_patch as patch_module
from deltachain.subscribe.targets.base import Patches
from tests.support.models import TinyModel, bits_of, plain_model, same, tensors_of
from tests.support.values import present
from tests.unit.subscribe.accidents import Run, unchanged

# Tensors of a module that others replace


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    return layers.to(torch.bfloat16)


class Served:
    """A module that holds version 0, and what it follows."""

    def __init__(self, url: Path) -> None:
        self.trained: Any = model()
        self.publisher = Publisher(str(url)).attach(self.trained)
        self.module: Any = model()
        self.subscriber = Subscriber(str(url), self.module)
        self.subscriber.update()

    def publish(self) -> None:
        with torch.no_grad():
            for parameter in self.trained.parameters():
                parameter.view(-1)[::7] += 0.5
        self.publisher.publish().result()

    def is_current(self) -> bool:
        return same(bits_of(self.module), bits_of(self.trained))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "chain")
    yield made
    made.publisher.close()


Change = Callable[[Any], object]


def data_replaced(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter.data)


def data_exchanged(module: Any) -> None:
    one, other = module[0].weight, module[1].weight
    one.data, other.data = other.data, one.data


def cast_and_back(module: nn.Module) -> None:
    module.to(torch.float64).to(torch.bfloat16)


def parameter_replaced(module: Any) -> None:
    module[1].weight = nn.Parameter(torch.zeros_like(module[1].weight))


def copied(module: Any) -> None:
    for layer in module:
        layer.weight = nn.Parameter(layer.weight.detach().clone())


def cast(module: nn.Module) -> None:
    module.half()


def tied(module: Any) -> None:
    module[1].weight = module[0].weight


def in_one_memory(module: Any) -> None:
    memory = torch.zeros(51, 16, dtype=torch.bfloat16)
    module[0].weight.data, module[1].weight.data = memory[1:], memory[:-1]


def emptied(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)


def without_memory(module: nn.Module) -> None:
    module.to("meta")


def transposed(module: Any) -> None:
    module[1].weight.data = module[1].weight.data.t().contiguous().t()


MOVED = (data_replaced, data_exchanged, cast_and_back, parameter_replaced, copied)
UNUSABLE = (cast, tied, in_one_memory, emptied, without_memory, transposed)


@pytest.mark.parametrize("change", MOVED)
@pytest.mark.parametrize("is_new", [True, False])
def test_tensors_that_were_replaced_get_the_next_version(
    served: Served, change: Change, is_new: bool
) -> None:
    if is_new:
        served.publish()
    change(served.module)
    served.subscriber.update()
    assert served.subscriber.version == int(is_new)
    assert served.is_current()


@pytest.mark.parametrize("change", MOVED)
def test_nothing_is_written_to_tensors_that_were_replaced_since_the_stage(
    served: Served, change: Change
) -> None:
    served.publish()
    staged = present(served.subscriber.stage())
    change(served.module)
    with pytest.raises(errors.BaseMismatchError, match="were replaced or written to since"):
        served.subscriber.swap(staged)
    assert served.subscriber.version is None
    served.subscriber.update()
    assert served.is_current()


@pytest.mark.parametrize("change", MOVED)
def test_a_scrub_reads_the_tensors_that_are_served(served: Served, change: Change) -> None:
    change(served.module)
    is_current = served.is_current()
    assert served.subscriber.scrub() == is_current
    assert served.subscriber.version == (0 if is_current else None)


@pytest.mark.parametrize("change", UNUSABLE)
@pytest.mark.parametrize("looks", ["scrub", "update", "swap"])
def test_tensors_that_the_chain_does_not_fit_any_more_are_refused(
    served: Served, change: Change, looks: str
) -> None:
    subscriber = served.subscriber
    served.publish()
    staged = present(subscriber.stage())
    change(served.module)
    with pytest.raises(errors.TensorMismatchError):
        subscriber.swap(staged) if looks == "swap" else getattr(subscriber, looks)()
    assert subscriber.version is None
    with pytest.raises(errors.DeltaChainError):
        subscriber.update()
    assert subscriber.version is None


def test_what_others_wrote_is_noticed_by_the_next_update(served: Served) -> None:
    for is_new in (False, True):
        with torch.no_grad():
            served.module[1].weight.add_(1)
        if is_new:
            with torch.no_grad():
                served.trained[0].weight[0, 0] += 1  # of another tensor
            served.publisher.publish().result()
        served.subscriber.update()
        assert served.subscriber.version == int(is_new)
        assert served.is_current()


def test_a_backward_pass_through_weights_that_were_updated_is_an_error(served: Served) -> None:
    loss = served.module(torch.arange(4)).square().sum()
    served.publish()
    served.subscriber.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Tensors that cannot be written in place


def read_only(tensor: Tensor, folder: Path) -> Tensor:
    np.save(folder / "weight.npy", tensor.detach().view(torch.int16).numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it has no such tensors
        return torch.from_numpy(np.load(folder / "weight.npy", mmap_mode="r")).view(tensor.dtype)


def sparse(tensor: Tensor, _: Path) -> Tensor:
    return tensor.detach().to_sparse()


def negated(tensor: Tensor, _: Path) -> Tensor:
    return torch._neg_view(tensor.detach())


def array(tensor: Tensor, _: Path) -> Any:
    return tensor.detach().view(torch.int16).numpy()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (read_only, "memory that cannot be written to"),
        (sparse, "no bits of its own"),
        (negated, "no bits of its own"),
        (array, "a ndarray, not a torch tensor"),
    ],
)
def test_tensors_that_cannot_be_written_in_place_are_refused(
    run: Run, tmp_path: Path, kind: Any, why: str
) -> None:
    run.publish()
    run.zeros["layer.weight"] = kind(run.zeros["layer.weight"], tmp_path)
    with pytest.raises(errors.DeltaChainError, match=why) as caught:
        run.join(run.zeros)
    assert caught.value.hint


def test_a_version_that_is_no_number_is_refused(run: Run) -> None:
    run.publish()
    subscriber: Any = run.subscribe(run.zeros)
    with pytest.raises(errors.DeltaChainError, match="version='1' is a str"):
        subscriber.update("1")
    with pytest.raises(errors.DeltaChainError, match="version='0' is a str"):
        subscriber.rollback("0")


# A swap that fails in the middle


class Writes:
    """Counts writes, and fails the one with a given number, half done or before it began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.failing: dict[int, BaseException] = {}
        monkeypatch.setattr(target_module, "write_patch", self._write)

    def fail(self, failures: dict[int, BaseException]) -> None:
        """Fail the writes of some numbers, counted from now."""
        self.done.clear()
        self.failing = failures

    def _write(self, live: Any, patch: patch_module.Patch) -> None:
        self.done.append(patch.spec.name)
        failure = self.failing.pop(len(self.done), None)
        if failure is None:
            patch_module.write(live, patch)
            return
        if patch.indices is not None:
            live.storage[patch.indices[0]] = patch.new[0]  # half done
        raise failure


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


@pytest.fixture
def subscriber(run: Run) -> Subscriber:
    """Holds version 1 of 2, in memory."""
    run.publish(1)
    subscriber = run.join(run.zeros)
    run.publish(2)
    return subscriber


LOST = OSError("device lost")
TWICE: dict[int, BaseException] = {3: LOST, 5: OSError("still lost")}


@pytest.mark.parametrize("failure", [LOST, RuntimeError("out of memory")])
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_a_failed_write_is_taken_back_bit_for_bit(
    run: Run, subscriber: Subscriber, writes: Writes, failure: BaseException, nth: int
) -> None:
    writes.fail({nth: failure})
    taken_back = pytest.raises(errors.PartialApplyError, match="taken back")
    with unchanged(run.zeros), taken_back as caught:
        subscriber.update()
    assert caught.value.tensor == writes.done[nth - 1]
    assert subscriber.version == 1
    assert subscriber.scrub()
    subscriber.update()
    assert run.matches(run.zeros)


def test_an_interrupted_write_is_taken_back_and_the_interrupt_goes_on(
    run: Run, subscriber: Subscriber, writes: Writes
) -> None:
    writes.fail({3: KeyboardInterrupt()})
    with unchanged(run.zeros), pytest.raises(KeyboardInterrupt):
        subscriber.update()
    subscriber.update()
    assert run.matches(run.zeros)


def test_a_failure_while_taking_back_poisons_and_heals(
    run: Run, subscriber: Subscriber, writes: Writes
) -> None:
    writes.fail(TWICE.copy())
    with pytest.raises(errors.PoisonedError, match="so did taking it back"):
        subscriber.update()
    assert subscriber.poisoned
    assert subscriber.version is None
    again = run.subscribe(subscriber.target, verify_at_start=False)
    assert again.chain is not None
    assert again.version is None  # nor is it believed by the next subscriber
    receipt = present(subscriber.update())
    assert receipt.previous is None
    assert run.matches(run.zeros)


def test_a_target_that_breaks_its_promise_poisons(
    subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(subscriber.target, "swap", crash)
    with pytest.raises(ZeroDivisionError):
        subscriber.update()
    assert subscriber.version is None


# What does not fit the budget


def staged_within(run: Run, budget: int) -> tuple[Subscriber, Staged, Patches]:
    """Who holds version 1, and staged version 2 with this many bytes."""
    run.publish(1)
    subscriber = run.join(run.zeros, stage_budget=budget)
    run.publish(2)
    staged = present(subscriber.stage())
    assert isinstance(staged.prepared, Patches)
    assert staged.prepared.deferred
    return subscriber, staged, staged.prepared


def test_what_does_not_fit_is_decoded_again_while_it_is_written(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish(1)
    subscriber = run.subscribe(run.zeros, stage_budget=4000)
    staged = present(subscriber.stage())
    assert isinstance(staged.prepared, Patches)
    assert staged.prepared.deferred
    assert staged.prepared.patches
    assert not staged.prepared.can_undo
    with monkeypatch.context() as patched:
        patched.setattr(host, "digest", None)  # the stage has proven all of it
        subscriber.swap(staged)
    assert run.matches(run.zeros)
    run.publish(2)
    subscriber.update()
    assert run.matches(run.zeros)


def test_a_failure_after_something_was_lost_poisons_and_heals(run: Run, writes: Writes) -> None:
    subscriber, staged, prepared = staged_within(run, 0)
    assert len(prepared.deferred) > 3
    writes.fail({3: LOST})
    with pytest.raises(errors.PoisonedError, match="was overwritten") as caught:
        subscriber.swap(staged)
    assert caught.value.tensor == writes.done[2]
    assert subscriber.version is None
    subscriber.update()
    assert run.matches(run.zeros)


def test_a_failure_before_anything_was_lost_is_taken_back(run: Run, writes: Writes) -> None:
    subscriber, staged, prepared = staged_within(run, 195)
    assert len(prepared.patches) > 1
    writes.fail({2: LOST})
    with unchanged(run.zeros), pytest.raises(errors.PartialApplyError):
        subscriber.swap(staged)
    assert subscriber.version == 1


# Tied weights


def test_tied_weights_are_written_once(run: Run, writes: Writes) -> None:
    run.publish(1)
    tied = TinyModel(seed=5)
    run.join(tied)
    assert writes.done.count("embed.weight") == 1
    assert run.matches(tied)
    assert tied.head.weight is tied.embed.weight


def test_tied_weights_in_two_places_are_written_twice(
    run: Run, subscriber: Subscriber, writes: Writes
) -> None:
    assert run.zeros["head.weight"].data_ptr() != run.zeros["embed.weight"].data_ptr()
    subscriber.update()
    assert writes.done.count("embed.weight") == 2
    assert torch.equal(run.zeros["head.weight"], run.zeros["embed.weight"])


def test_either_name_of_a_tied_weight_will_do(run: Run) -> None:
    run.publish(1)
    del run.zeros["embed.weight"]
    run.join(run.zeros)
    assert run.matches(run.zeros)


def test_tied_weights_that_differ_prove_nothing(run: Run, subscriber: Subscriber) -> None:
    run.zeros["head.weight"].view(-1)[0] = 1.0
    assert subscriber.target.state() is None
    assert not subscriber.scrub()


# Targets, and the model of the chain


def wrong_targets(model: TinyModel) -> dict[str, Any]:
    """Targets that are not quite the model."""
    missing, extra, shape, dtype, strided, tied = (tensors_of(model) for _ in range(6))
    del missing["layer.bias"]
    extra["other.weight"] = torch.zeros(3)
    shape["layer.bias"] = shape["layer.bias"][:-1].clone()
    dtype["layer.bias"] = dtype["layer.bias"].float()
    strided["layer.weight"] = strided["layer.weight"].t().contiguous().t()
    tied["norm.bias"] = tied["norm.weight"]
    return {
        "missing": missing,
        "extra": extra,
        "shape": shape,
        "dtype": dtype,
        "strided": strided,
        "tied": tied,
        "other": plain_model(),
    }


WHY = {
    "missing": "a dict must have all tensors",
    "extra": r"(?s)not in the chain: 'other.weight' of the target.*of the chain alone",
    "shape": "(?s)layer.bias.*not the model of this chain",
    "dtype": "(?s)layer.bias.*load the target in the chain's dtype",
    "strided": "give the target contiguous tensors",
    "tied": "(?s)norm.*give each name memory of its own",
    "other": "not the model of this chain",
}


@pytest.mark.parametrize("kind", WHY)
def test_a_target_of_another_model_is_refused_and_not_written_to(run: Run, kind: str) -> None:
    run.publish()
    target = wrong_targets(run.model)[kind]
    for _ in range(2):  # and again when asked again
        refused = pytest.raises(errors.TensorMismatchError, match=WHY[kind])
        with unchanged(target), refused as caught:
            run.join(target)
        assert caught.value.tensor


def test_a_wrapped_module_is_matched_by_the_names_of_its_checkpoint(run: Run) -> None:
    run.publish(1)
    replica = TinyModel(seed=9)
    compiled: nn.Module = torch.compile(replica, backend="eager")  # type: ignore[assignment]
    run.join(compiled)
    assert run.matches(replica)


@pytest.mark.parametrize("on_host", [True, False])
def test_versions_are_written_in_place(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, on_host: bool
) -> None:
    """Bits of a device are torch tensors: the same target, forced onto that path."""
    if not on_host:
        monkeypatch.setattr(torch_kernels, "on_host", lambda _: False)
    run.publish(1)
    addresses = {name: tensor.data_ptr() for name, tensor in run.zeros.items()}
    subscriber = run.join(TensorTarget(run.zeros))
    for seed in (2, 3):
        run.publish(seed, share=0.02 if seed == 2 else 1.0)
        subscriber.update()
        assert run.matches(run.zeros)
    assert {name: tensor.data_ptr() for name, tensor in run.zeros.items()} == addresses
    assert subscriber.scrub()
    assert subscriber.rollback().version == 2
    assert subscriber.scrub()

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltachain.errors import (
    BaseMismatchError,
    DeltaChainError,
    PartialApplyError,
    PoisonedError,
    TensorMismatchError,
)
from deltachain.kernels import torch_kernels
from deltachain.publish import Publisher
from deltachain.subscribe import Subscriber, TensorTarget
from deltachain.subscribe.targets import base as target_module
from deltachain.subscribe.targets import tensor_patch as patch_module
from deltachain.subscribe.targets.local import Patches
from tests.support.models import TinyModel, bits_of, plain_model, same, tensors_of
from tests.support.values import present

Change = Callable[[nn.Module], Any]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    return layers.to(torch.bfloat16)


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


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    trained = model()
    with Publisher(str(tmp_path)).attach(trained) as publisher:
        yield trained, publisher


@pytest.fixture
def follower(trained: Any, tmp_path: Path) -> tuple[Any, Subscriber]:
    """A module that holds version 0, and its subscriber."""
    del trained
    served = model()
    subscriber = Subscriber(str(tmp_path), served)
    subscriber.update()
    return served, subscriber


def publish(trained: nn.Module, publisher: Publisher) -> None:
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.view(-1)[::7] += 0.5
    publisher.publish().result()


@pytest.mark.parametrize("change", MOVED)
@pytest.mark.parametrize("is_new", [True, False])
def test_tensors_that_were_replaced_get_the_next_version(
    trained: Any, follower: tuple[Any, Subscriber], change: Change, is_new: bool
) -> None:
    served, subscriber = follower
    if is_new:
        publish(*trained)
    change(served)
    subscriber.update()
    assert subscriber.version == int(is_new)
    assert same(bits_of(served), bits_of(trained[0]))


@pytest.mark.parametrize("change", MOVED)
def test_nothing_is_written_to_tensors_that_were_replaced_since_the_stage(
    trained: Any, follower: tuple[Any, Subscriber], change: Change
) -> None:
    served, subscriber = follower
    publish(*trained)
    staged = present(subscriber.stage())
    change(served)
    with pytest.raises(BaseMismatchError, match="were replaced or written to since"):
        subscriber.swap(staged)
    assert subscriber.version is None
    subscriber.update()
    assert same(bits_of(served), bits_of(trained[0]))


@pytest.mark.parametrize("change", MOVED)
def test_a_scrub_reads_the_tensors_that_are_served(
    trained: Any, follower: tuple[Any, Subscriber], change: Change
) -> None:
    served, subscriber = follower
    change(served)
    is_same = same(bits_of(served), bits_of(trained[0]))
    assert subscriber.scrub() == is_same
    assert subscriber.version == (0 if is_same else None)


def test_what_others_wrote_is_noticed_by_the_next_update(
    trained: Any, follower: tuple[Any, Subscriber]
) -> None:
    served, subscriber = follower
    for is_new in (False, True):
        with torch.no_grad():
            served[1].weight.add_(1)
        if is_new:
            with torch.no_grad():
                trained[0][0].weight[0, 0] += 1  # of another tensor
            trained[1].publish().result()
        subscriber.update()
        assert subscriber.version == int(is_new)
        assert same(bits_of(served), bits_of(trained[0]))


def test_a_backward_pass_through_weights_that_were_updated_is_an_error(
    trained: Any, follower: tuple[Any, Subscriber]
) -> None:
    served, subscriber = follower
    loss = served(torch.arange(4)).square().sum()
    publish(*trained)
    subscriber.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def read_only(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    np.save(folder / "weight.npy", tensor.detach().view(torch.int16).numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it has no such tensors
        return torch.from_numpy(np.load(folder / "weight.npy", mmap_mode="r")).view(tensor.dtype)


def sparse(tensor: torch.Tensor, _: Path) -> torch.Tensor:
    return tensor.detach().to_sparse()


def negated(tensor: torch.Tensor, _: Path) -> torch.Tensor:
    return torch._neg_view(tensor.detach())


def array(tensor: torch.Tensor, _: Path) -> Any:
    return tensor.detach().view(torch.int16).numpy()


@pytest.mark.usefixtures("trained")
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
    tmp_path: Path, kind: Any, why: str
) -> None:
    tensors = dict(model().state_dict())
    (tmp_path / "other").mkdir()
    tensors["1.weight"] = kind(tensors["1.weight"], tmp_path / "other")
    with pytest.raises(DeltaChainError, match=why) as caught:
        Subscriber(str(tmp_path), tensors).update()
    assert caught.value.hint


@pytest.mark.usefixtures("trained")
def test_a_version_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeltaChainError, match="version='1' is a str"):
        Subscriber(str(tmp_path), model()).update("1")  # type: ignore[arg-type]
    with pytest.raises(DeltaChainError, match="version='0' is a str"):
        Subscriber(str(tmp_path), model()).rollback("0")  # type: ignore[arg-type]


@pytest.mark.parametrize("change", UNUSABLE)
@pytest.mark.parametrize("looks", ["scrub", "update", "swap"])
def test_tensors_that_the_chain_does_not_fit_any_more_are_refused(
    trained: Any, follower: tuple[Any, Subscriber], change: Change, looks: str
) -> None:
    served, subscriber = follower
    publish(*trained)
    staged = present(subscriber.stage())
    change(served)
    with pytest.raises(TensorMismatchError):
        subscriber.swap(staged) if looks == "swap" else getattr(subscriber, looks)()
    assert subscriber.version is None
    with pytest.raises(DeltaChainError):
        subscriber.update()
    assert subscriber.version is None


Publish = Callable[..., None]
Subscribe = Callable[..., Subscriber]


class Writes:
    """Counts writes, and fails the one with a given number, half done or before it began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.failing: dict[int, BaseException] = {}
        monkeypatch.setattr(target_module, "write_patch", self._write)

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
def subscriber(zeros: dict[str, Tensor], subscribe: Subscribe, publish: Publish) -> Subscriber:
    """Holds version 1 of 2."""
    publish(1)
    subscriber = subscribe(zeros)
    subscriber.update()
    publish(2)
    return subscriber


# A swap that fails in the middle


@pytest.mark.parametrize("failure", [OSError("device lost"), RuntimeError("out of memory")])
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_a_failed_write_is_taken_back_bit_for_bit(
    subscriber: Subscriber,
    zeros: dict[str, Tensor],
    writes: Writes,
    model: TinyModel,
    failure: BaseException,
    nth: int,
) -> None:
    before = bits_of(zeros)
    writes.failing[nth] = failure
    with pytest.raises(PartialApplyError, match="taken back") as caught:
        subscriber.update()
    assert caught.value.tensor == writes.done[nth - 1]
    assert same(bits_of(zeros), before)
    assert subscriber.version == 1
    assert subscriber.scrub()
    subscriber.update()
    assert same(bits_of(zeros), bits_of(model))


def test_an_interrupted_write_is_taken_back_and_the_interrupt_goes_on(
    subscriber: Subscriber, zeros: dict[str, Tensor], writes: Writes, model: TinyModel
) -> None:
    before = bits_of(zeros)
    writes.failing[3] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        subscriber.update()
    assert same(bits_of(zeros), before)
    subscriber.update()
    assert same(bits_of(zeros), bits_of(model))


def test_a_failure_while_taking_back_poisons(
    subscriber: Subscriber, zeros: dict[str, Tensor], writes: Writes, model: TinyModel
) -> None:
    writes.failing.update({3: OSError("device lost"), 5: OSError("still lost")})
    with pytest.raises(PoisonedError, match="so did taking it back"):
        subscriber.update()
    assert subscriber.poisoned
    assert subscriber.version is None
    receipt = present(subscriber.update())
    assert receipt.previous is None
    assert same(bits_of(zeros), bits_of(model))


def test_a_target_that_breaks_its_promise_poisons(
    subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(subscriber.target, "swap", crash)
    with pytest.raises(ZeroDivisionError):
        subscriber.update()
    assert subscriber.version is None


def test_a_poisoned_target_is_not_believed_by_the_next_subscriber(
    subscriber: Subscriber, subscribe: Subscribe, writes: Writes
) -> None:
    writes.failing.update({3: OSError("device lost"), 5: OSError("still lost")})
    with pytest.raises(PoisonedError):
        subscriber.update()
    again = subscribe(subscriber.target, verify_at_start=False)
    assert again.chain is not None
    assert again.version is None


# What does not fit the budget


def test_what_does_not_fit_is_decoded_again_while_it_is_written(
    subscribe: Subscribe, publish: Publish, zeros: dict[str, Tensor], model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(zeros, stage_budget=4000)
    staged = present(subscriber.stage())
    assert isinstance(staged.prepared, Patches)
    assert staged.prepared.deferred
    assert staged.prepared.patches
    assert not staged.prepared.can_undo
    subscriber.swap(staged)
    assert same(bits_of(zeros), bits_of(model))
    publish(2)
    subscriber.update()
    assert same(bits_of(zeros), bits_of(model))


def test_a_failure_after_something_was_lost_poisons_and_heals(
    subscribe: Subscribe,
    publish: Publish,
    zeros: dict[str, Tensor],
    model: TinyModel,
    writes: Writes,
) -> None:
    publish(1)
    subscriber = subscribe(zeros, stage_budget=0)
    subscriber.update()
    publish(2)
    staged = present(subscriber.stage())
    assert isinstance(staged.prepared, Patches)
    assert len(staged.prepared.deferred) > 3
    writes.done.clear()
    writes.failing[3] = OSError("device lost")
    with pytest.raises(PoisonedError, match="was overwritten") as caught:
        subscriber.swap(staged)
    assert caught.value.tensor == writes.done[2]
    assert subscriber.version is None
    subscriber.update()
    assert same(bits_of(zeros), bits_of(model))


def test_a_failure_before_anything_was_lost_is_taken_back(
    subscribe: Subscribe, publish: Publish, zeros: dict[str, Tensor], writes: Writes
) -> None:
    publish(1)
    subscriber = subscribe(zeros, stage_budget=195)
    subscriber.update()
    publish(2)
    staged = present(subscriber.stage())
    assert isinstance(staged.prepared, Patches)
    assert staged.prepared.deferred
    assert len(staged.prepared.patches) > 1
    before = bits_of(zeros)
    writes.done.clear()
    writes.failing[2] = OSError("device lost")
    with pytest.raises(PartialApplyError):
        subscriber.swap(staged)
    assert same(bits_of(zeros), before)
    assert subscriber.version == 1


# Tied weights


def test_tied_weights_are_written_once(
    subscriber: Subscriber, model: TinyModel, writes: Writes, subscribe: Subscribe
) -> None:
    subscriber.update()
    assert "embed.weight" in writes.done
    writes.done.clear()
    tied = TinyModel(seed=5)
    subscribe(tied).update()
    assert writes.done.count("embed.weight") == 1
    assert same(bits_of(tied), bits_of(model))
    assert tied.head.weight is tied.embed.weight


def test_tied_weights_in_two_places_are_written_twice(
    subscriber: Subscriber, zeros: dict[str, Tensor], writes: Writes
) -> None:
    assert zeros["head.weight"].data_ptr() != zeros["embed.weight"].data_ptr()
    subscriber.update()
    assert writes.done.count("embed.weight") == 2
    assert torch.equal(zeros["head.weight"], zeros["embed.weight"])


def test_either_name_of_a_tied_weight_will_do(
    subscribe: Subscribe, publish: Publish, zeros: dict[str, Tensor], model: TinyModel
) -> None:
    publish(1)
    del zeros["embed.weight"]
    subscribe(zeros).update()
    assert same(bits_of(zeros), bits_of(model))


def test_tied_weights_that_differ_prove_nothing(
    subscriber: Subscriber, zeros: dict[str, Tensor]
) -> None:
    zeros["head.weight"].view(-1)[0] = 1.0
    assert subscriber.target.state() is None
    assert not subscriber.scrub()


def test_addresses_never_change(subscriber: Subscriber, zeros: dict[str, Tensor]) -> None:
    before = {name: tensor.data_ptr() for name, tensor in zeros.items()}
    subscriber.update()
    assert {name: tensor.data_ptr() for name, tensor in zeros.items()} == before


# Targets that are not the model of the chain


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


@pytest.mark.usefixtures("publisher")
@pytest.mark.parametrize("kind", ["missing", "extra", "shape", "dtype", "strided", "tied", "other"])
def test_a_target_of_another_model_is_refused_and_not_written_to(
    subscribe: Subscribe, model: TinyModel, kind: str
) -> None:
    target = wrong_targets(model)[kind]
    before = bits_of(target)
    for _ in range(2):  # and again when asked again
        with pytest.raises(TensorMismatchError) as caught:
            subscribe(target).update()
    assert caught.value.tensor
    assert same(bits_of(target), before)


def test_a_wrapped_module_is_matched_by_the_names_of_its_checkpoint(
    subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    replica = TinyModel(seed=9)
    compiled: nn.Module = torch.compile(replica, backend="eager")  # type: ignore[assignment]
    subscribe(compiled).update()
    assert same(bits_of(replica), bits_of(model))


def test_a_replica_that_was_loaded_from_the_checkpoint_needs_deltas_alone(
    publisher: Publisher, publish: Publish, subscribe: Subscribe
) -> None:
    assert publisher.version == 0
    publish(1)
    loaded = TinyModel()  # what version 0 is
    receipt = present(subscribe(loaded).update())
    assert receipt.previous == 0
    assert receipt.plan.startswith("0 to 1: delta->1 ")


def test_device_tensors_take_the_same_way(
    subscribe: Subscribe, publish: Publish, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits of a device are torch tensors: the same target, forced onto that path."""
    publish(1)
    zeros = tensors_of(model)

    monkeypatch.setattr(torch_kernels, "on_host", lambda _: False)
    subscriber = subscribe(TensorTarget(zeros))
    subscriber.update()
    for seed in (2, 3):
        publish(seed, share=0.02 if seed == 2 else 1.0)
        subscriber.update()
        assert same(bits_of(zeros), bits_of(model))
    assert subscriber.scrub()
    assert subscriber.rollback().version == 2
    assert subscriber.scrub()

"""Modules whose tensors are replaced, cast, moved or tied after a subscriber bound them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltachain.errors import BaseMismatchError, DeltaChainError, TensorMismatchError
from deltachain.publish import Publisher
from deltachain.subscribe import Subscriber
from tests.support.models import bits_of, same
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

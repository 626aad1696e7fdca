"""What happens to a live model after it was attached: followed, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.refusals import MemoryRange, ModelForm, TensorForm
from deltachain.publish.model.source import collect_weights
from deltachain.store import MemoryStore
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same

Attach = Callable[..., Publisher]


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


def changed_(model: nn.Module) -> None:
    with torch.no_grad():
        list(model.parameters())[-1].add_(1)


def refused(publisher: Publisher, store: MemoryStore, message: str) -> ConfigError:
    """Publish, and see the refusal; nothing is committed, and the refusal is always the same."""
    version = publisher.version
    for _ in range(2):
        with pytest.raises(ConfigError, match=message) as caught:
            publisher.publish()
    assert max(recompute(store)) == version
    assert caught.value.hint
    return caught.value


# Memory


def smaller(weight: nn.Parameter) -> None:
    weight.data = torch.zeros(2, 24, dtype=weight.dtype)


def empty(weight: nn.Parameter) -> None:
    weight.data = torch.zeros(0, dtype=weight.dtype)


def freed(weight: nn.Parameter) -> None:
    """As offloaders do: the tensor stays, its storage goes."""
    weight.data = weight.data.clone()
    weight.untyped_storage().resize_(0)


def cut(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()
    weight.untyped_storage().resize_(weight.untyped_storage().nbytes() // 2)


def swapped(weight: nn.Parameter) -> None:
    weight.data = weight.data.t().contiguous().t()


def halved(weight: nn.Parameter) -> None:
    weight.data = weight.data.half()


OTHER_DATA = [
    (smaller, r"is torch.bfloat16\(2, 24\), and was torch.bfloat16\(40, 24\)"),
    (empty, r"is torch.bfloat16\(0,\), and was torch.bfloat16\(40, 24\)"),
    (freed, "needs 1920 bytes of memory, of which 0 are there"),
    (cut, "needs 1920 bytes of memory, of which 960 are there"),
    (swapped, "not contiguous"),
    (halved, r"is torch.float16\(40, 24\), and was torch.bfloat16"),
]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("quantization", [None, "fp8-block"])
@pytest.mark.parametrize(("change", "message"), OTHER_DATA)
def test_other_data_of_a_weight_is_refused_before_it_is_read(
    change: Callable[[nn.Parameter], None],
    message: str,
    quantization: str | None,
    frozen: bool,
    store: MemoryStore,
    quantising: Attach,
) -> None:
    model: Any = frozen_first() if frozen else plain_model()
    publisher = quantising(model, quantization)
    change(model[0].weight)
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
    assert same(recompute(store)[1].state, bits_of(model))


def test_a_model_that_is_on_the_meta_device_is_refused(store: MemoryStore, attach: Attach) -> None:
    model = plain_model()
    publisher = attach(model)
    model.to("meta")
    refused(publisher, store, r"'0.weight' has no data \(meta device\)")


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
    session = publisher._session
    assert session is not None
    with pytest.raises(ConfigError, match=r"'0.weight' needs 1920 bytes"):
        session.add_anchor(session.begin_anchor(), topic="")


# Names and ties


def test_a_head_that_is_untied_is_refused(store: MemoryStore, attach: Attach) -> None:
    model: Any = TinyModel()
    publisher = attach(model)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    caught = refused(publisher, store, "'head.weight' and 'embed.weight' were one tensor")
    assert "tie_weights" in caught.hint
    model.head.weight = model.embed.weight
    changed_(model)
    assert publisher.publish().result().version == 1


def test_tied_names_may_be_two_tensors_of_one_memory(store: MemoryStore, attach: Attach) -> None:
    model: Any = TinyModel()
    publisher = attach(model)
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    with torch.no_grad():
        model.head.weight.add_(1)
    publisher.publish().result()
    assert same(recompute(store)[1].state, bits_of(model))


def add_buffer(model: nn.Module) -> None:
    model.register_buffer("scores", torch.zeros(3))


def add_parameter(model: nn.Module) -> None:
    model.register_parameter("scores", nn.Parameter(torch.zeros(3)))


@pytest.mark.parametrize("add", [add_buffer, add_parameter])
def test_a_tensor_that_is_new_is_refused(
    add: Callable[[nn.Module], None], store: MemoryStore, attach: Attach
) -> None:
    model = plain_model()
    publisher = attach(model)
    add(model)
    caught = refused(publisher, store, "'scores' was not there")
    assert "URL of its own" in caught.hint


def test_a_buffer_that_is_not_saved_may_come(attach: Attach) -> None:
    model = plain_model()
    publisher = attach(model)
    model.register_buffer("scores", torch.zeros(3), persistent=False)
    changed_(model)
    assert publisher.publish().result().version == 1


def test_a_state_dict_that_has_other_tensors_since_is_refused(
    store: MemoryStore, attach: Attach
) -> None:
    model = plain_model()
    publisher = attach(model)

    def halved(_: nn.Module, state: dict[str, Tensor], prefix: str, *__: object) -> None:
        state[f"{prefix}0.weight"] = state[f"{prefix}0.weight"] * 0.5

    model.register_state_dict_post_hook(halved)
    refused(publisher, store, r"'0\.weight' is not the same in the model's state_dict")


def test_a_tensor_that_is_gone_is_refused(store: MemoryStore, attach: Attach) -> None:
    model: Any = TinyModel()
    publisher = attach(model)
    del model.head
    assert "URL of its own" in refused(publisher, store, "'head.weight' is gone").hint


@pytest.mark.parametrize("convert", ["half", "double"])
def test_another_dtype_is_refused(convert: str, store: MemoryStore, attach: Attach) -> None:
    model = plain_model()
    publisher = attach(model)
    getattr(model, convert)()
    refused(publisher, store, r"is torch.float(16|64)\(40, 24\), and was torch.bfloat16\(40, 24\)")


# Frozen weights


def assigned(model: Any, values: Tensor) -> None:
    model[0].weight = nn.Parameter(values, requires_grad=False)


def given(model: Any, values: Tensor) -> None:
    model[0].weight.data = values


def loaded(model: Any, values: Tensor) -> None:
    model.load_state_dict(model.state_dict() | {"0.weight": values}, assign=True)
    model[0].weight.requires_grad_(False)


def copied(model: Any, values: Tensor) -> None:
    """As target networks are averaged: torch counts no write."""
    model[0].weight.data.copy_(values)


@pytest.mark.parametrize("quantization", [None, "fp8-block"])
@pytest.mark.parametrize("replace", [assigned, given, loaded, copied])
def test_a_frozen_weight_is_replaced(
    replace: Callable[[Any, Tensor], None],
    quantization: str | None,
    store: MemoryStore,
    quantising: Attach,
) -> None:
    """By equal bits as often as one likes; by others never, unless it is quantised: compared."""
    model: Any = frozen_first()
    publisher = quantising(model, quantization)
    for _ in range(3):
        replace(model, model[0].weight.detach().clone())
        changed_(model)
        publisher.publish().result()
    replace(model, model[0].weight.detach() + 1)
    if quantization is None:
        refused(publisher, store, "'0.weight' did not require a gradient .* changed since")
    else:
        assert publisher.publish().result().nnz > 0


def test_a_frozen_weight_in_the_memory_of_a_trained_one_is_compared(
    store: MemoryStore, attach: Attach
) -> None:
    model: Any = TinyModel()
    model.head.weight = nn.Parameter(model.embed.weight.data, requires_grad=False)
    publisher = attach(model)
    with torch.no_grad():
        model.embed.weight.add_(1)
    publisher.publish().result()
    assert same(recompute(store)[1].state, bits_of(model))


def test_a_frozen_weight_that_moves_into_such_memory_is_refused(
    store: MemoryStore, attach: Attach
) -> None:
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].weight.requires_grad_(False)
    publisher = attach(model)
    model[0].weight.data = model[1].weight.data
    refused(publisher, store, "'0.weight' was frozen .* in the memory of a weight that is trained")


def form(start: int, stop: int, device: str = "cpu") -> TensorForm:
    return TensorForm(
        torch.int8, (stop - start,), (stop - start,), None, False, MemoryRange(device, start, stop)
    )


@pytest.mark.parametrize("seed", range(50))
def test_shared_memory_is_found_wherever_it_is(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(end: int) -> int:
        return int(torch.randint(end, (), generator=draw))

    forms = {}
    for name in "abcdefgh":
        start = number(30)
        forms[name] = form(start, start + number(6), "cpu" if number(2) else "cuda:0")
    frozen = {name for name in forms if number(2)}

    def meet(one: MemoryRange, other: MemoryRange) -> bool:
        both = max(one.start, other.start) < min(one.stop, other.stop)
        return one.device == other.device and both

    expected = {
        name
        for name in frozen
        if any(meet(forms[name].memory, forms[o].memory) for o in forms.keys() - frozen)
    }
    assert ModelForm(forms).shared(frozen) == expected


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

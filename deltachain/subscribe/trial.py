"""Whether an engine's own loading can be trusted to load again: tried, and taken back.

Loading what is loaded already must change no bit. Loading something else must change what it is
about: a loader that quietly does nothing passes the first test. And loading the first again must
lead back, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.errors import TensorMismatchError
from deltachain.subscribe.engine import EngineModel
from deltachain.subscribe.patch import same_bits
from deltachain.subscribe.recorder import Load
from deltachain.subscribe.windows import storage_bits

Weights: TypeAlias = Callable[[], Iterable[tuple[str, Tensor]]]

ENOUGH: Final = 0.5
"""Share of a live tensor that changes when everything it is loaded from does; padding does not."""


def try_load(model: EngineModel, weights: Weights, layers: Mapping[str, frozenset[str]]) -> str:
    """Try the engine's own loader on weights that the model holds; afterwards it holds them again.

    Args:
        model: Not in use meanwhile.
        weights: Makes what is loaded, each time anew: loaders edit their input.
        layers: Into which each of them is loaded.

    Returns:
        Why it can not be trusted; empty when it can.
    """

    def others(trial: _Trial) -> None:
        for name, tensor in weights():
            model.load(_changed([(name, tensor)]))
            trial.expect_trace(name, layers.get(name, frozenset()))

    return _try(_Trial(model, frozenset().union(*layers.values())), model.load, weights, others)


def try_reload(model: EngineModel, weights: Weights, layers: frozenset[str]) -> str:
    """Try to reload whole layers; otherwise as :func:`try_load`.

    Args:
        model: Not in use meanwhile.
        weights: Makes every tensor of these layers.
        layers: Those that are reloaded, and those that share weights with them.
    """

    def others(trial: _Trial) -> None:
        model.reload(_changed(weights()))
        trial.expect_other()

    return _try(_Trial(model, layers), model.reload, weights, others)


def _try(trial: _Trial, load: Load, weights: Weights, others: Callable[[_Trial], None]) -> str:
    try:
        with trial.model.restoring(), torch.no_grad():
            load(weights())
            trial.expect_same()
            others(trial)
            load(weights())
            trial.expect_same()
    except Exception as exc:  # noqa: BLE001 - an engine's loader may raise anything
        trial.put_back()
        told = exc.args[0] if isinstance(exc, TensorMismatchError) else repr(exc)
        return f"loading it again fails: {told}"[:200]
    return ""


class _Trial:
    """Everything the model held and computed before."""

    def __init__(self, model: EngineModel, layers: frozenset[str]) -> None:
        self.model = model
        self.layers = layers
        self.tensors = dict(model.tensors())
        self.live = {name: tensor.detach() for name, tensor in self.tensors.items()}
        self.saved = {name: bits_on_host(tensor) for name, tensor in self.live.items()}
        self.computed = self._outputs()

    def expect_same(self) -> None:
        """Refuse any bit that changed, and any tensor that moved; what is derived may.

        Raises:
            TensorMismatchError: One did.
        """
        for name, tensor in self._current():
            if not same_bits(bits_on_host(tensor), self.saved[name]):
                raise TensorMismatchError(f"{name} changed", tensor=name)
        for layer, output in self._outputs().items():
            if not same_bits(output, self.computed[layer]):
                raise TensorMismatchError(f"{layer} computes something else", tensor=layer)

    def expect_trace(self, name: str, layers: frozenset[str]) -> None:
        """Refuse a tensor that leaves no trace in any weight of its layers.

        Raises:
            TensorMismatchError: It left none.
        """
        for live, tensor in self._current():
            layer, _, _ = live.rpartition(".")
            if layer in layers and _share(bits_on_host(tensor), self.saved[live]):
                return
        raise TensorMismatchError(f"nothing follows {name}", tensor=name)

    def expect_other(self) -> None:
        """Refuse a weight of these layers that did not follow.

        Raises:
            TensorMismatchError: One did not.
        """
        for name, tensor in self._current():
            layer, _, _ = name.rpartition(".")
            if layer not in self.layers or not tensor.is_floating_point():
                continue
            if _share(bits_on_host(tensor), self.saved[name]) < ENOUGH:
                raise TensorMismatchError(f"{name} does not follow what is loaded", tensor=name)
        for layer, output in self._outputs().items():
            if _share(output, self.computed[layer]) < ENOUGH:
                raise TensorMismatchError(f"{layer} does not follow what is loaded", tensor=layer)

    def _outputs(self) -> dict[str, npt.NDArray[Any]]:
        return {name: bits_on_host(y) for name, y in self.model.compute(self.layers).items()}

    def _current(self) -> Iterator[tuple[str, Tensor]]:
        now: Mapping[str, Tensor] = self.model.tensors()
        for name, tensor in self.live.items():
            if self.model.is_derived(name):
                continue
            if name not in now or now[name].data_ptr() != tensor.data_ptr():
                raise TensorMismatchError(f"{name} was replaced", tensor=name)
            yield name, tensor

    def put_back(self) -> None:
        """Give every live tensor the bits it had, where it had them."""
        for name, tensor in self.live.items():
            if self.tensors[name].data_ptr() != tensor.data_ptr():
                self.tensors[name].data = tensor
            bits = storage_bits(tensor)
            if isinstance(bits, Tensor):
                bits.copy_(torch.from_numpy(self.saved[name]))
            else:
                bits[...] = self.saved[name]


def _changed(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights of which every element is another, by more than any rounding."""
    for name, tensor in weights:
        if tensor.is_floating_point():
            wide = tensor.float()
            yield name, torch.where(wide == 0, 1.0, 2 * wide).to(tensor.dtype)
        else:
            yield name, tensor ^ 1


def bits_on_host(tensor: Tensor) -> npt.NDArray[Any]:
    """A copy of a tensor's storage on the host: a device has no room for a second model."""
    bits = storage_bits(tensor)
    return bits.to("cpu", copy=True).numpy() if isinstance(bits, Tensor) else bits.copy()


def _share(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """How much of two arrays differs."""
    return float((one != other).mean())

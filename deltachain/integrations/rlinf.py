"""RLinf: a weight syncer whose messages name a version, and whose weights are in a store.

A receiver that joins late or restarts takes the head from the store, without its sender; a sender
that restarts goes on with the chain. No message waits for the other side.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from rlinf.hybrid_engines.weight_syncer import WeightSyncer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deltachain.chain.chain import Chain
from deltachain.errors import ConfigError, NoChainError, NoVersionError, TensorMismatchError
from deltachain.kernels.protocol import same_bits
from deltachain.kernels.torch_kernels import bits_of, on_host
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.torch_names import TORCH_DTYPES


def register() -> None:
    """Add ``type: deltachain`` to weight syncers, its arguments under ``deltachain``.

    RLinf calls this in each of its workers with ``RLINF_EXT_MODULE=deltachain.integrations.rlinf``.
    """
    theirs = WeightSyncer.create  # RLinf has no registry

    def create(config: Any) -> WeightSyncer:  # noqa: ANN401 - a DictConfig
        is_ours = config is not None and config.get("type") == "deltachain"
        return DeltaChainWeightSyncer(**config["deltachain"]) if is_ours else theirs(config)

    WeightSyncer.create = create


class DeltaChainWeightSyncer(WeightSyncer):  # type: ignore[misc]  # RLinf has no types
    """Weight syncer of RLinf over a chain; the actor's ranks each publish their shards.

    Receivers may have other dtypes than the sender, and each its own: weights are then cast as
    ``Tensor.copy_`` does, from a second copy in the chain's dtype.

    Args:
        url: The chain, which all workers can reach.
        prefixes: Names, and what begins with one and a dot, that are published beside the trained
            parameters and buffers. ``None`` for the whole state dict, so that a receiver may start
            from any weights; none for receivers that all load the frozen ones themselves.
        settings: Other fields of :class:`PublishConfig`, such as ``dtype="BF16"`` for a sender with
            fp32 masters.
    """

    def __init__(self, url: str, prefixes: Sequence[str] | None = None, **settings: Any) -> None:  # noqa: ANN401 - fields
        super().__init__()
        self.config, self.prefixes = PublishConfig.at(url, None, **settings), prefixes
        self._state: Mapping[str, Tensor] = {}
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None
        self._bound: Mapping[str, Any] = {}  # where its tensors are
        self._copies: dict[str, Tensor] = {}  # of live tensors of other forms, as in the chain
        self._ties: dict[str, Tensor] = {}  # as in the chain, by the names of those in its memory
        self._held: tuple[int, int | None] | None = None  # version and step

    async def init_sender(
        self,
        state_dict: dict[str, Tensor],
        param_names_need_sync: list[str],
        *_: Any,  # noqa: ANN401 - RLinf's send and recv
        **__: Any,  # noqa: ANN401
    ) -> None:
        """Create the chain, or continue it; a ``ConfigError`` names a prefix of no tensor."""
        tensors = {n: one for n, one in state_dict.items() if "_extra_state" not in n}
        chosen = set(tensors if self.prefixes is None else param_names_need_sync)
        for prefix in self.prefixes or ():
            chosen |= {n for n in tensors if f"{n}.".startswith(f"{prefix}.")} or {prefix}
        if absent := sorted(chosen - tensors.keys()):
            hint = "a prefix is a whole name, or what is before a dot in one"
            raise ConfigError(f"the state dict has no {absent[0]!r}", hint=hint)
        names, self._state = sorted(chosen), state_dict
        publisher = Publisher(self.config)
        self._publisher = publisher.attach(lambda: ((name, self._state[name]) for name in names))
        await super().init_sender(state_dict, names, None)

    async def sync(self, state_dict: dict[str, Tensor], send: Any, version: int | Tensor) -> None:  # noqa: ANN401 - RLinf's
        """Publish the changes since the last sync, then send where they are."""
        if self._publisher is None:
            raise ConfigError("this syncer is no sender yet", hint="await init_sender first")
        self._state = state_dict
        self._publisher.publish(step=int(version))
        self._publisher.flush()
        self._state = {}  # or what its owner frees would stay
        there = {"url": self.config.url, "version": self._publisher.version, "step": int(version)}
        await send(there)

    async def init_receiver(self, state_dict: dict[str, Tensor] | None, *_: Any, **__: Any) -> None:  # noqa: ANN401 - recv and send
        """Take the head of the chain, if there is one yet."""
        if state_dict is not None:
            with suppress(NoChainError, NoVersionError):
                self._update(state_dict)
        await super().init_receiver(state_dict, None)

    async def apply(self, model: nn.Module, recv: Any) -> int:  # noqa: ANN401 - RLinf's
        """Write the version of the next message into a model; return RLinf's version of it.

        Raises:
            TensorMismatchError: The model lacks a tensor of the chain, has it in another shape, or
                ties tensors that differ in the chain.
        """
        message = await recv()
        if self._held is None or self._held[0] < message["version"]:
            self._update(model.state_dict(), message["version"])
        step = self._held[1] if self._held else None  # or newer than the message
        return int(message["step"] if step is None else step)

    def _update(self, live: Mapping[str, Any], version: int | None = None) -> None:
        bound = {n: (one.data_ptr(), one.dtype, one.device) for n, one in _whole(live).items()}
        if self._subscriber is None or bound != self._bound:  # such as offloaded, and back
            config = SubscribeConfig(url=self.config.url, undo_applies=0)
            self._subscriber, self._bound = Subscriber(config, self._target(live)), bound
        receipt = self._subscriber.update(version)
        for name, copy in self._copies.items():
            tied = self._ties.get(name)
            if tied is not None and not same_bits(bits_of(copy), bits_of(tied).to(copy.device)):
                hint = "the sender does not tie them: untie them in the receiver"
                found = f"{name!r} shares memory with another tensor, and has other bits"
                raise TensorMismatchError(found, tensor=name, hint=hint)
            live[name].detach().copy_(copy)
        if receipt is not None:
            self._held = receipt.version, receipt.step
        elif self._held is None and self._subscriber.version is not None:
            self._held = self._subscriber.version, None  # it was there before
        if not all(map(on_host, _whole(live).values())):
            self._subscriber, self._ties = None, {}  # or what is offloaded would stay there

    def _target(self, live: Mapping[str, Any]) -> dict[str, Tensor]:
        copies, target, seen = dict[str, Tensor](), dict[str, Tensor](), dict[Any, str]()
        self._ties = {}
        whole = _whole(live)
        for spec in Chain.open(open_store(self.config.url)).table.specs():
            tensor, dtype = whole.get(spec.name), TORCH_DTYPES[spec.dtype]
            if tensor is None:
                kind = type(live.get(spec.name)).__name__
                found = f"{spec.name!r} is a {kind}, expected a whole tensor"
                hint = "the receiver is another model, or a sharded one"
                raise TensorMismatchError(found, tensor=spec.name, hint=hint)
            target[spec.name], place = tensor.detach(), (tensor.device, tensor.data_ptr())
            if place in seen:
                self._ties[spec.name] = target[seen[place]]
            if tensor.dtype != dtype or place in seen or not tensor.is_contiguous():
                made = self._copies.get(spec.name)
                if made is None:
                    made = torch.empty_like(tensor, dtype=dtype).contiguous()
                target[spec.name] = copies[spec.name] = made
            seen.setdefault(place, spec.name)
        self._copies = copies
        return target


def _whole(live: Mapping[str, Any]) -> dict[str, Tensor]:
    return {n: o for n, o in live.items() if isinstance(o, Tensor) and not isinstance(o, DTensor)}

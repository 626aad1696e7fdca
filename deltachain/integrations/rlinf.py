"""RLinf: a weight syncer whose messages name a version, and whose weights are in a store.

A receiver that joins late or restarts takes the head from the store, without its sender; a sender
that restarts goes on with the chain. No message waits for the other side.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from rlinf.hybrid_engines.weight_syncer import WeightSyncer
from rlinf.hybrid_engines.weight_syncer.base import RecvFn, SendFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deltachain.chain.chain import Chain
from deltachain.errors import ConfigError, ObjectNotFoundError, TensorMismatchError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.torch_names import TORCH_DTYPES


class Notice(TypedDict):
    """The message of a sync: where the weights are, not what they are."""

    url: str
    version: int  # of the chain
    step: int  # RLinf's version


class DeltaChainWeightSyncer(WeightSyncer):  # type: ignore[misc]  # RLinf has no types
    """Weight syncer of RLinf over a chain; the actor's ranks each publish their shards.

    Receivers may have other dtypes than the sender, and each its own: changed weights are then cast
    as ``Tensor.copy_`` does, from a second copy in the chain's dtype.

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
        self._names: list[str] = []
        self._state: Mapping[str, Tensor] = {}
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []  # live tensors, and theirs as in the chain

    async def init_sender(
        self,
        state_dict: dict[str, Tensor],
        param_names_need_sync: list[str],
        send: SendFn,
        recv: RecvFn | None = None,
    ) -> None:
        """Create the chain, or continue it with the weights of ``state_dict``.

        Raises:
            ConfigError: A prefix or a parameter is the name of no tensor.
        """
        del send, recv
        tensors = {n: one for n, one in state_dict.items() if "_extra_state" not in n}
        chosen = set(tensors if self.prefixes is None else param_names_need_sync)
        for prefix in self.prefixes or ():
            below = {n for n in tensors if n == prefix or n.startswith(f"{prefix}.")}
            chosen |= below or {prefix}
        if absent := sorted(chosen - tensors.keys()):
            raise ConfigError(
                f"the state dict has no {absent[0]!r}",
                hint="a prefix is a whole name or what is before a dot in one",
            )
        self._names, self._state = sorted(chosen), state_dict
        publisher = Publisher(self.config)
        self._publisher = publisher.attach(lambda: ((n, self._state[n]) for n in self._names))
        self._sender_initialized = True

    async def sync(
        self, state_dict: dict[str, Tensor], send: SendFn, version: int | Tensor
    ) -> None:
        """Publish the changes since the last sync, then send where they are."""
        if self._publisher is None:
            raise ConfigError("this syncer is no sender yet", hint="await init_sender first")
        self._state = state_dict
        self._publisher.publish(step=int(version))
        self._publisher.flush()
        await send(Notice(url=self.config.url, version=self._publisher.version, step=int(version)))

    async def init_receiver(
        self, state_dict: dict[str, Tensor] | None, recv: RecvFn, send: SendFn | None = None
    ) -> None:
        """Take the head of the chain, if there is one yet."""
        del recv, send
        if state_dict is not None:
            try:
                self._follow(state_dict).update()
                self._cast()
            except ObjectNotFoundError:
                self._subscriber = None
        self._receiver_initialized = True

    async def apply(self, model: nn.Module, recv: RecvFn) -> int:
        """Write the version of the next message into a model; return RLinf's version of it.

        Raises:
            TensorMismatchError: The model lacks a tensor of the chain, or has it in another shape.
        """
        notice: Notice = await recv()
        follower = self._subscriber or self._follow(model.state_dict())
        if follower.version is None or follower.version < notice["version"]:
            follower.update(notice["version"])
            self._cast()
        last = follower.last  # of a newer version, if the receiver began after the message
        return notice["step"] if last is None or last.step is None else last.step

    def _follow(self, live: Mapping[str, Any]) -> Subscriber:
        chain, target, seen = Chain.open(open_store(self.config.url)), dict[str, Tensor](), set()
        self._copies = []
        for spec in chain.table.specs():
            tensor, dtype = live.get(spec.name), TORCH_DTYPES[spec.dtype]
            if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
                raise TensorMismatchError(
                    f"{spec.name!r} is a {type(tensor).__name__}, expected a whole tensor",
                    tensor=spec.name,
                    hint="the receiver is another model, or a sharded one",
                )
            target[spec.name] = tensor.detach()
            tied = tensor.numel() and (tensor.device, tensor.data_ptr()) in seen
            if tensor.dtype != dtype or tied or not tensor.is_contiguous():
                target[spec.name] = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
                self._copies.append((tensor.detach(), target[spec.name]))
            seen.add((tensor.device, tensor.data_ptr()))
        config = SubscribeConfig(url=self.config.url, undo_applies=0)
        self._subscriber = Subscriber(config, target)
        return self._subscriber

    def _cast(self) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)

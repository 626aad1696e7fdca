"""The interfaces of an inference engine: one rank's model, and the whole replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from deltachain.replica.messages import AnyRequest, RankReply


class EngineModel(Protocol):
    """One rank's model. The engine does not run it during any of these calls but ``tensors``."""

    @property
    def checkpoint(self) -> Path:
        """The checkpoint folder that the engine loaded."""

    def modules(self) -> Mapping[str, nn.Module]:
        """Every module by dotted name, those of a draft model included."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Every live tensor with elements, by dotted name, but for the KV cache.

        A name begins with that of the module that holds the tensor. Tensors that a module keeps in
        containers, or in objects that act after loading, are among them.
        """

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> object:
        """The engine's own loader, as after construction; it may edit what it is given."""

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole layers again by the engine's own reload, its post-load processing included.

        Raises:
            EngineVersionError: This version of the engine cannot.
        """

    def repack(self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some layers from nothing: raw weights, the loader, post-load processing.

        May leave new tensors in the place of old ones. Takes time in proportion to the layers.

        Raises:
            EngineVersionError: This version of the engine gives no way to do so.
        """

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        """The layers that each checkpoint tensor is loaded into, before post-load processing.

        Args:
            names: Meta tensors in the checkpoint's shapes and dtypes, by name.
        """

    def processed(self) -> frozenset[str]:
        """Layers with post-load processing."""

    def made_by_running(self) -> frozenset[str]:
        """Live tensors that running made or changed, since the checkpoint was loaded.

        None where that is not known.
        """

    def is_plain(self, layer: str) -> bool:
        """Whether a layer was seen to multiply by its weight and add its bias, any bits of them."""

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        """What layers compute from a fixed input, the same each time.

        Of linear layers, their bias included, and of other layers that can be tried by themselves.
        A layer that cannot is left out.
        """


class Engine(Protocol):
    """A replica: its ranks, and its scheduler."""

    def call(self, request: AnyRequest) -> Sequence[RankReply]:
        """Send a request to every rank, and wait for all replies; in the order of the ranks.

        Raises:
            ApplyError: A rank did not reply, or its reply cannot be read.
        """

    def is_paused(self) -> bool:
        """Whether generation is paused, by this or any other client."""

    def pause(self, *, in_doubt: bool = False) -> None:
        """Pause generation, so that weights can be written. Idempotent.

        Args:
            in_doubt: The weights cannot be trusted: running requests stop at once in any mode, and
                their cache is dropped at the next swap and name, even if caches are kept.
        """

    def resume(self) -> None:
        """Resume generation."""

    def name_version(self, version: int) -> None:
        """Label tokens with this version from now on, and drop what older versions cached."""

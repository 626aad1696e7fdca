"""What deltachain asks of an inference engine: of one rank's model, and of the whole replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn


class EngineModel(Protocol):
    """One rank's model. Nobody runs it while any of these is called, ``tensors`` excepted."""

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

    def call(self, verb: str, **arguments: Any) -> Sequence[Mapping[str, Any]]:  # noqa: ANN401
        """Ask every rank, and wait for every answer; in the order of the ranks.

        Raises:
            ApplyError: Some rank did not answer.
        """

    def is_paused(self) -> bool:
        """Whether somebody has stopped it from generating."""

    def pause(self, *, in_doubt: bool = False) -> None:
        """Stop generating, so that weights can be written; again changes nothing.

        Args:
            in_doubt: Its weights are not to be trusted: running requests stop where they are in any
                mode, and what they cached goes with the next swap and name, even if it is kept.
        """

    def resume(self) -> None:
        """Generate again."""

    def name_version(self, version: int) -> None:
        """Let tokens be known by this version from now on, and forget what older ones cached."""

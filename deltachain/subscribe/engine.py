"""What deltachain asks of an inference engine: of one rank's model, and of the whole replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


class EngineModel(Protocol):
    """One rank's model. Nobody runs it while any of these is called, ``tensors`` excepted."""

    @property
    def checkpoint(self) -> Path:
        """The checkpoint folder that the engine loaded."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Every live tensor with elements, by dotted name."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> object:
        """The engine's own loader, as after construction; it may edit what it is given."""

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole layers again, and pack them again as after the first load, in place.

        Raises:
            EngineVersionError: This version of the engine can not.
        """

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        """The layers that each checkpoint tensor is loaded into.

        Args:
            names: Meta tensors in the checkpoint's shapes and dtypes, by name.
        """

    def processed(self) -> frozenset[str]:
        """Layers whose weights the engine may rearrange after loading, where they lie."""

    def is_plain(self, layer: str) -> bool:
        """Whether a layer was seen to multiply by its weight and add its bias, any bits of them."""

    def packed(self) -> Mapping[str, str]:
        """Layers that compute from a hidden copy of an intact parameter, and how that was seen."""

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        """What those of some layers that hide their weights compute from a fixed input."""

    def is_derived(self, name: str) -> bool:
        """Whether a live tensor is known to be made by the engine, not by a checkpoint."""

    def restoring(self) -> AbstractContextManager[None]:
        """Puts the layers' own attributes back if its body raises."""


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

"""The interfaces of an inference engine: one rank's model, and the whole replica."""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from deltachain.errors import ApplyError, ConfigError

from .capabilities import SERVER, CapabilityTable
from .messages import AnyRequest, RankReply


def pause_mode(named: str, modes: Sequence[str]) -> str:
    """Validate and return a pause mode; empty means the first one, the default."""
    if named and named not in modes:
        raise ConfigError(
            f"the pause mode is none of {', '.join(modes)}",
            hint="name one of them in DELTACHAIN_PAUSE, or unset it for the first one",
        )
    return named or modes[0]


def start_faults(
    table: CapabilityTable, pauses: Sequence[str], installed: str, environment: Mapping[str, str]
) -> Iterator[ConfigError]:
    """Yield what keeps the installed version of an engine from following any chain."""
    named = environment.get("DELTACHAIN_PAUSE", "").strip()
    uses = (named, SERVER) if environment.get("DELTACHAIN_URL") else (named,)
    for check in (partial(table.check, installed, uses), partial(pause_mode, named, pauses)):
        try:
            check()
        except ConfigError as exc:
            yield exc


def age(name: str) -> int:
    """Return a key that sorts names of versions; names of other clients come first."""
    return int(name) if name.isdecimal() else -1


_T = TypeVar("_T")


def run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine of an engine on its event loop, and wait for the result."""
    running: asyncio.AbstractEventLoop | None = None
    with suppress(RuntimeError):
        running = asyncio.get_running_loop()
    if running is loop:
        coroutine.close()
        raise ConfigError(
            "this thread runs the event loop of the engine, and cannot wait for it",
            hint="call it in another thread: await asyncio.to_thread(subscriber.update)",
        )
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    except ApplyError:
        raise
    except Exception as exc:  # engines raise plain exceptions, also when they are dead
        raise ApplyError(f"the engine did not answer: {exc}") from exc


class EngineModel(Protocol):
    """The model of one rank; the engine does not run it during any call except ``tensors``."""

    @property
    def checkpoint(self) -> Path:
        """Folder of the checkpoint that the engine loaded."""

    def modules(self) -> Mapping[str, nn.Module]:
        """Return every module by dotted name, modules of a draft model included."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return every live tensor with elements by dotted name, except the KV cache.

        The name of a tensor begins with the name of its module. Tensors in containers of a module
        are included, and tensors in its objects that take part in post-load processing.
        """

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> object:
        """Call the engine's own loader, as after construction; it may edit its input tensors."""

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole layers again by the engine's own reload, its post-load processing included.

        Raises:
            EngineVersionError: This version of the engine has no such reload.
        """

    def repack(self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some layers from nothing: create raw weights, call the loader, process them.

        May replace live tensors by new ones. The time is proportional to the size of the layers.

        Raises:
            EngineVersionError: This version of the engine does not support repacking.
        """

    def loaded_apart(
        self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]
    ) -> AbstractContextManager[Mapping[str, nn.Module]]:
        """Load some layers from nothing into modules apart from the model, and process them.

        Meanwhile and afterwards the model holds the same members and bits as before. The memory
        that this takes is that of the layers.

        Args:
            layers: Names of the layers.
            tensors: All tensors that are loaded into them, by checkpoint name.

        Returns:
            A context with the loaded modules, by the names of those that must be equal to them:
            the layers with quantised weights or scales, and others whose tensors are made from
            these. Empty if none of the layers has any; nothing is loaded then.

        Raises:
            EngineVersionError: This version of the engine does not support it.
            Exception: Any error of the engine.
        """

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        """Return the layers that each checkpoint tensor is loaded into, before they are processed.

        Args:
            names: Meta tensors in the checkpoint's shapes and dtypes, by name.
        """

    def slots(self) -> Mapping[str, tuple[int, ...]]:
        """Return the number of the expert in each slot of this rank, by layer, as of now.

        ``load`` writes every expert into all of its slots. Empty if the engine moves no experts.

        Raises:
            ExpertsMovedError: The engine is moving some.
        """

    def processed(self) -> frozenset[str]:
        """Return the names of layers with post-load processing."""

    def made_by_running(self) -> frozenset[str]:
        """Return the live tensors created or changed by running, since the checkpoint was loaded.

        An empty set where that is not known.
        """

    def is_plain(self, layer: str) -> bool:
        """Return whether a layer was shown to multiply by its weight and add its bias, any bits."""

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        """Return the outputs of layers for a fixed input, the same input at each call.

        Covers linear layers, bias included, and other layers that can be run by themselves. All
        other layers are left out.
        """

    def probe(self, layer: nn.Module, seed: int) -> Tensor | None:
        """Return the outputs of a layer of this model, or of one loaded apart, for several rows.

        Rows are decided by the seed, and some have a single element other than zero: the output of
        such a row is a column of the weight. ``None`` for layers that cannot be run by themselves.
        """


class Engine(Protocol):
    """A replica: its ranks and its scheduler."""

    @property
    def software(self) -> str:
        """Name and version of the engine, such as ``vllm/0.32.0``."""

    def call(self, request: AnyRequest) -> Sequence[RankReply]:
        """Send a request to every rank, and return all replies in the order of the ranks.

        Raises:
            ApplyError: A rank did not reply, or its reply cannot be read.
        """

    def is_dead(self) -> bool:
        """Return whether the engine, or one of its ranks, has ended; without a request to it."""

    def is_paused(self) -> bool:
        """Return whether generation is paused, by this or any other client."""

    def pause(self, *, in_doubt: bool = False) -> None:
        """Pause generation, so that weights can be written; idempotent.

        Args:
            in_doubt: Whether the weights are untrusted. Running requests then stop at once in any
                mode, and their cache is dropped by the next swap and ``name_version``, even if
                caches are kept.
        """

    def resume(self) -> None:
        """Resume generation."""

    def oldest(self) -> str:
        """Return the name of the oldest version of whose caches running requests read.

        Empty if none outlives the weights that made it.
        """

    def name_version(self, version: int) -> None:
        """Label tokens with this version from now on, and drop cache entries of older versions."""

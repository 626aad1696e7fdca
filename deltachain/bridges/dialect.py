"""What a dialect is: how another system lays out versions as files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from deltachain.errors import ConfigError, MalformedError
from deltachain.store import Store
from deltachain.types import Bits, Buffer, Indices, TensorSpec, mismatch


@dataclass(frozen=True, slots=True)
class ElementChange:
    """Changed elements of one tensor.

    ``indices`` are ``(nnz,)`` flat and increasing; ``old`` and ``new`` are their bits.
    """

    spec: TensorSpec
    indices: Indices
    old: Bits
    new: Bits


@dataclass(frozen=True, slots=True)
class HostModel:
    """All tensors of a version, by name.

    ``bits`` returns the flat bits of one tensor, which are never written in place. Those of a
    version in files are read, and proven, in each call, so that one tensor is in memory.
    """

    specs: Mapping[str, TensorSpec]
    bits: Callable[[str], Bits]
    assets: Mapping[str, bytes] = field(default_factory=dict)  # configuration, tokenizer

    def spec(self, name: str, key: str) -> TensorSpec:
        if name not in self.specs:
            raise MalformedError(f"{key}: has {name!r}, which the model has not", key=key)
        return self.specs[name]

    def changed(self, reads: Mapping[str, Callable[[], Bits]]) -> "HostModel":
        """Return the version after this one, with the bits that some functions read."""
        return replace(self, bits=lambda name: reads[name]() if name in reads else self.bits(name))

    def check_same(self, other: "HostModel", key: str) -> None:
        for name in sorted(self.specs.keys() | other.specs.keys()):
            found, expected = other.specs.get(name), self.specs.get(name)
            if message := mismatch(name, found, key, expected, "the version before"):
                raise MalformedError(message, key=key)


Objects: TypeAlias = Iterator[tuple[str, Buffer]]
"""Keys and contents in the order of their writes; the last one commits the version."""


class Dialect(Protocol):
    """A layout of files; a version is there once its *marker*, written last, is."""

    counts: bool = False
    """Whether receivers start from a base checkpoint as number 0 and need every later number."""

    proves_base: bool = True
    """Whether changes prove which weights they are of; if not, they are new bits of elements."""

    shares_folders: bool = False
    """Whether a version is one file in a folder with others, instead of a folder of its own."""

    def number(self, key: str) -> int | None:
        """Return the number of the version that an object commits; ``None`` if it is no marker."""

    def full(self, number: int, model: HostModel) -> Objects:
        """Write a version that needs no earlier one."""

    def delta(
        self, number: int, model: HostModel, changes: Sequence[ElementChange]
    ) -> Objects | None:
        """Write a version that follows ``number - 1``; ``model`` has the new bits.

        ``None`` if all versions are full.
        """
        del number, model, changes
        return None

    def is_full(self, store: Store, key: str) -> bool:
        """Return whether the version of a marker needs no earlier one."""

    def read(self, store: Store, key: str, before: HostModel | None) -> HostModel:
        """Read the version of a marker; ``before`` is the version before, which is not changed.

        What is wrong with a tensor may be raised as its bits are read.

        Raises:
            FormatError: A file is cut short, contradicts itself, or gives other bits than it says.
            ObjectNotFoundError: A file of the version is missing.
        """


def required(before: HostModel | None, key: str) -> HostModel:
    if before is None:
        raise ConfigError(
            f"{key} has changes only, and nothing says of which weights",
            hint="give their base checkpoint with --base, or wait for a full version",
        )
    return before

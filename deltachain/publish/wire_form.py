"""Wire form of a changed tensor: its changes, a window, or all its bits."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from deltachain.chain.upload import DENSE_SHARE
from deltachain.codec import Change
from deltachain.codec.encodings import Encoding
from deltachain.codec.encodings.sparse import OverwriteEncoding, StepEncoding
from deltachain.delta import ABSOLUTE, STEP, OldBits, TensorDelta
from deltachain.format.keys import digest_key
from deltachain.kernels import host, threaded
from deltachain.kernels.arrays import Changes
from deltachain.kernels.protocol import digest_change
from deltachain.publish.model.layout import AdjacentRuns
from deltachain.threads import Pool, cores
from deltachain.types import Bits, StateDigest, TensorSpec

if TYPE_CHECKING:
    from deltachain.kernels.device_diff import Landing
    from deltachain.publish.model.source import Weight


SMALL_NNZ: Final = 1 << 14  # changes of a weight below which no thread is worth its start


class CheckpointChanges(NamedTuple):
    """Changes of one checkpoint tensor, by flat indices, and of the state digest by them."""

    weight: "Weight"
    spec: TensorSpec
    changes: Changes
    digest: StateDigest
    is_part: bool = False  # whether others may have more changes of the tensor

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.changes)


class Mapped(NamedTuple):
    """Changed elements of live weights, the same mapped to the checkpoint, and their digest."""

    live: Mapping[str, Changes]
    by_tensor: Iterable[CheckpointChanges] = ()
    digest: StateDigest = StateDigest()


class Diff:
    """Changed elements of the weights of a rank; ``nnz`` is their number.

    The trainer does not wait for the rest: it is found in the first use, by any thread. ``then`` is
    called with it once.
    """

    def __init__(
        self,
        nnz: int,
        find: Callable[[], Mapped],
        then: Callable[[Mapped], None] = lambda _: None,
    ) -> None:
        self.nnz = nnz
        self._find, self._then = find, then
        self._mapped: Mapped | None = None
        self._finding = Lock()

    def complete(self) -> Mapped:
        with self._finding:
            if self._mapped is None:
                mapped = self._find()
                self._then(mapped)
                self._mapped = mapped
            return self._mapped

    @property
    def live(self) -> Mapping[str, Changes]:
        return self.complete().live

    @property
    def digest(self) -> StateDigest:
        return self.complete().digest


NO_CHANGES = Diff(0, lambda: Mapped({}))


def map_landed(
    landings: "Iterable[Landing]", found: dict[str, Changes], weights: "Iterable[Weight]"
) -> Mapped:
    """Complete diffs on devices, whose changes are added to ``found``; map all of them."""
    for landing in landings:
        landing.complete(found)
    return map_changes(found, weights)


def map_changes(live: Mapping[str, Changes], weights: "Iterable[Weight]") -> Mapped:
    """Map changes of live weights to the checkpoint, and digest them, on all cores."""
    changed = [(weight, live[weight.spec.name]) for weight in weights if weight.spec.name in live]
    with Pool(cores()) as pool:
        parts = pool.ordered(
            _mapped, changed, ahead=4 * cores(), small=lambda one: one[1].indices.size < SMALL_NNZ
        )
        mapped = [one for part in parts for one in part]
    return Mapped(live, mapped, sum((one.digest for one in mapped), StateDigest()))


def _mapped(changed: "tuple[Weight, Changes]") -> list[CheckpointChanges]:
    weight, found = changed
    mapped = []
    for spec, select, indices in weight.element_map.split(found.indices):
        changes = Changes(indices, found.old[select], found.new[select])
        mapped.append(CheckpointChanges(weight, spec, changes, digest_change(spec, *changes)))
    return mapped


def sparse_change(
    spec: TensorSpec,
    changes: Changes,
    digest: StateDigest,
    bits: Callable[[], Bits] | None,
    *,
    encoding: Encoding,
    run: tuple[Callable[[], Bits], int] | None = None,
) -> Change:
    """Return the smaller wire form of a changed tensor: its changes, or all its bits.

    ``bits`` reads all bits of the tensor after the change; it is ``None`` if other ranks have some.
    ``run`` reads consecutive elements, all changed ones among them, and has the index of the first;
    encodings with old bits need it. Where these do not suit, ``step`` replaces them, and
    ``overwrite`` replaces ``step`` if smaller.
    """
    if not encoding.suits(spec) or (run is None and encoding.encodes_with_old(spec)):
        encoding = StepEncoding()
    nbytes, overwrite = encoding.estimate(spec, changes), OverwriteEncoding()
    if bits is not None and nbytes > DENSE_SHARE * spec.nbytes:
        return dense_change(spec, bits())
    if not encoding.absolute and nbytes > overwrite.estimate(spec, changes):
        encoding = overwrite
    delta = TensorDelta(
        spec=spec,
        indices=changes.indices,
        values=changes.new if encoding.absolute else changes.new - changes.old,
        absolute=ABSOLUTE if encoding.absolute else STEP,
    )
    before = None
    if encoding.encodes_with_old(spec) and run is not None:
        before = partial(_bits_before, changes, *run)
    return Change(delta, digest, encoding=encoding, old=before, may_be_step=True)


def _bits_before(changes: Changes, after: Callable[[], Bits], start: int) -> OldBits:
    bits = after().copy()
    bits[changes.indices - start] = changes.old
    return OldBits(bits, start)


def dense_change(spec: TensorSpec, bits: Bits) -> Change:
    return Change(TensorDelta.dense(spec, bits), host.digest(digest_key(spec), bits))


def digest_window(window: AdjacentRuns, mine: Bits) -> StateDigest:
    key = digest_key(window.spec)
    if isinstance(window.indices, range):
        return threaded.digest(key, mine, window.indices.start)
    return host.digest_at(key, window.indices, mine)


def window_change(window: AdjacentRuns, mine: Bits, digest: StateDigest | None = None) -> Change:
    spec, indices = window.spec, window.indices
    digest = digest_window(window, mine) if digest is None else digest
    if isinstance(indices, range):
        run = TensorDelta.run(spec, indices.start, mine)
        return Change(run, digest, windows=not run.is_dense)
    delta = TensorDelta(spec=spec, indices=indices, values=mine, absolute=ABSOLUTE)
    return Change(delta, digest, windows=True)

"""Reader of a spool: what a plan says of each tensor, as its objects arrive.

In a plan of one edge every object gives elements of its own (FORMAT.md 2): each of its tensors is
decoded by itself, while later objects are on their way, unless it needs old bits that another may
change. Longer plans are folded, tensor by tensor, once all objects are there.
"""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from deltachain import errors
from deltachain.chain.tensor_plan import TensorPlan
from deltachain.checkpoint import Checkpoint
from deltachain.codec import ENCODINGS, Part
from deltachain.delta import OldBits
from deltachain.file_access import map_file
from deltachain.kernels import host
from deltachain.kernels.protocol import kernels_for
from deltachain.subscribe.targets.tensor_patch import LiveElements
from deltachain.types import TensorSpec

if TYPE_CHECKING:
    from .batches import GroupPlan, Stager

from .spool import FAILED, SpooledObject, object_file, read_index, writer_is_gone


def host_bits(places: Sequence[LiveElements], spec: TensorSpec, low: int, high: int) -> OldBits:
    """Return bits of the elements ``[low, high)`` that a rank holds, on the host.

    Where those that it holds are consecutive, only these are returned, on the host the live bits
    themselves; others are copied to their places.
    """
    run, nothing = _run(places), np.empty(0, spec.bits_dtype)
    if run is not None:
        storage: Any = places[0].storage
        start, at, numel = run
        return OldBits(host.receive(storage[at : at + numel], nothing), start, shared=True)
    bits, held = np.zeros(high - low, spec.bits_dtype), np.zeros(high - low, np.bool_)
    for place in places:
        here, live = _views(place, bits, low)
        here[...] = host.receive(live, nothing)
        _views(place, held, low)[0][...] = True
    return OldBits(bits, low, held)


def _run(places: Sequence[LiveElements]) -> tuple[int, int, int] | None:
    """Return flat index, position in the storage and number of elements consecutive in both."""
    first, *others = places
    if others:
        return None
    offset, at, dims = first.box
    numel = 1
    for size, there, live in reversed(dims.tolist()):
        if size > 1 and (there, live) != (numel, numel):
            return None
        numel *= size
    return offset, at, numel


def _views(place: LiveElements, flat: Any, start: int) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the elements of a place in flat bits that begin at ``start``, and the live ones."""
    offset, at, dims = place.box
    sizes, there, live = dims.T.tolist() if dims.size else ([1], [1], [1])
    return (
        kernels_for(flat).strided(flat, offset - start, sizes, there),
        kernels_for(place.storage).strided(place.storage, at, sizes, live),
    )


POLL_S: Final = (0.001, 0.004)
"""Shortest and longest wait between two looks for an object, in seconds."""


class SpoolReader:
    """Reader of a spool, for ranks; objects are mapped, and read where they lie.

    ``abandon`` is called while an object is awaited, and returns whether to stop.
    """

    def __init__(self, folder: Path, abandon: Callable[[], bool] = lambda: False) -> None:
        self._folder = folder
        self._abandon = abandon
        try:
            self._index = read_index(folder)
        except OSError as exc:
            raise errors.ApplyError(f"the spool {folder.name} is gone: {exc.strerror}") from exc
        self.from_nothing = self._index.from_nothing
        self._base = Checkpoint(Path(self._index.base)) if self._index.base else None

    def tensor_plans(self) -> Iterator[TensorPlan]:
        """Yield every tensor plan of the plan, as soon as all of its objects are there."""
        return cast("Iterator[TensorPlan]", self.plans((), frozenset()))

    def plans(
        self, stagers: "Sequence[Stager]", absent: Collection[str]
    ) -> "Iterator[TensorPlan | GroupPlan]":
        """Yield groups of tensors that stagers take, and tensor plans of others.

        Each is yielded as soon as all of its objects are there; tensors that are ``absent`` are
        left out.
        """
        folds = self._base is not None or len({one.edge for one in self._index.objects}) > 1
        alone = () if folds or self.from_nothing else stagers
        later: dict[str, list[tuple[int, Part]]] = {}
        specs: dict[str, TensorSpec] = dict(self._base.specs) if self._base else {}
        opened: list[tuple[int, Part]] = []
        for number, spooled in enumerate(self._index.objects):
            part = self._open(number, spooled)
            opened.append((spooled.edge, part))
            others = (yield from _grouped(opened[-1:], alone)).union(absent)
            for name, row in part.rows.items():
                if name in others:
                    continue
                if folds or self._waits(part, name):
                    later.setdefault(name, []).append((spooled.edge, part))
                    specs.setdefault(name, row.spec)
                else:
                    yield TensorPlan(row.spec, (part,), None, self.from_nothing)
        together = [one for one in stagers if one.folds and not (self._base or self.from_nothing)]
        others = (yield from _grouped(opened, together if folds else ())).union(absent)
        for name in [name for name in specs if name not in others]:
            edges, parts = zip(*later[name], strict=True) if name in later else ((), ())
            yield TensorPlan(specs[name], parts, self._base, self.from_nothing, edges)

    def _waits(self, part: Part, name: str) -> bool:
        """Return whether a tensor of a plan of one edge is decoded with those of later objects."""
        if self.from_nothing:
            row = part.rows[name]
            return ENCODINGS.get(row.encoding).sparse or row.nnz != row.spec.numel
        return part.needs_old(name) and len(self._index.objects) > 1

    def _open(self, number: int, spooled: SpooledObject) -> Part:
        file, ref = object_file(self._folder, number), spooled.ref
        self._await(file, ref.key)
        part = Part.from_bytes(map_file(file), key=ref.key)
        if part.digest != ref.directory:
            raise errors.DigestMismatchError(
                f"{ref.key}: directory", expected=ref.directory, actual=part.digest, key=ref.key
            )
        return part

    def _await(self, file: Path, key: str) -> None:
        wait, longest = POLL_S
        while not file.exists():
            ended = writer_is_gone(self._folder)  # looked at first: a writer may just have finished
            if file.exists():
                return
            failed = self._folder / FAILED
            if failed.exists() or ended:
                why = "the process that fetched it has ended"
                why = failed.read_text(errors="replace") if failed.exists() else why
                raise errors.ApplyError(f"{key} was not fetched: {why}")
            if self._abandon():
                message = f"{key} has not arrived, and the rank cannot wait for it"
                raise errors.StageAbandonedError(message)
            time.sleep(wait)
            wait = min(2 * wait, longest)


def _grouped(
    objects: Sequence[tuple[int, Part]], stagers: "Sequence[Stager]"
) -> "Generator[GroupPlan, None, set[str]]":
    """Yield the groups of tensors that stagers take; return the names of these."""
    taken: set[str] = set()
    for stager in stagers:
        groups, names = stager.groups(objects)
        yield from groups
        taken |= names
    return taken

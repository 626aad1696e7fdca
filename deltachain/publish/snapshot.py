"""Snapshot of the last published bits, and the diff against it.

Weights on the host are compared in place by the host kernels, with a fused cast from fp32 master
weights. Weights on a CUDA device with Triton are compared there, and only changes are copied back;
their snapshot is in pinned host memory, and copied over in batches, or on the device. Weights on
other devices are copied to the host for each diff.
"""

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from mmap import mmap
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from deltachain import threads as slab
from deltachain.disk_space import hint_for, reserve
from deltachain.errors import ConfigError, UnsupportedModelError
from deltachain.format.keys import digest_key
from deltachain.kernels import host, threaded, torch_kernels
from deltachain.kernels.arrays import Changes
from deltachain.kernels.device_diff import (
    ALIGNMENT,
    Compared,
    CopyStream,
    DeviceDiff,
    Landing,
    compares_on,
)
from deltachain.publish.model.layout import AdjacentRuns
from deltachain.publish.model.refusals import COMPARED_WHOLE, refuse_scale, refuse_tensor
from deltachain.publish.model.source import ModelTensors, Weight, cast_to
from deltachain.publish.wire_form import Diff, Mapped, digest_window, map_landed
from deltachain.threads import Pool, cores
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import Bits, Indices, StateDigest

logger = logging.getLogger(__name__)

WINDOW_NUMEL: Final = 1 << 20
"""Elements copied and digested at a time by each thread: few enough to stay in cache."""

DEVICE_WINDOW_NUMEL: Final = 1 << 26  # elements digested at a time on a device

FILE_NUMEL: Final = 4 * WINDOW_NUMEL
"""Elements of a file that are read, digested and compared at a time."""

SMALL_NUMEL: Final = WINDOW_NUMEL // 8
"""Elements of a weight below which no thread is worth its start."""

TURN_NUMEL: Final = 4 * WINDOW_NUMEL
"""Elements of the largest frozen weight that a diff reads when it is its turn: milliseconds."""

SnapshotPlace: TypeAlias = Literal["host", "device", "disk"]
"""Where a snapshot is: in host memory, pinned for weights on a device, or there; or in a file."""

RESERVE_SHARE: Final = 2
"""Part of a device's memory that a snapshot leaves free, as a divisor: activations need it."""

OPTIMIZER_COPIES: Final = 6
"""Size of what an optimizer may allocate in its first step, in snapshots: an fp32 master and two
fp32 moments of bf16 weights."""

SLAB_NBYTES: Final = 1 << 30
"""Size of a slab, in bytes, unless less is left or a single tensor is larger."""

READ_NUMEL: Final = 1 << 23  # elements copied at a time from a snapshot on a device

PIECE: Final = 1 << 19
"""Elements of a frozen weight copied by one operation: less than a millisecond."""


class Memory(NamedTuple):
    """Free and total memory of a device, in bytes."""

    free: int
    total: int


def reserve_nbytes(total: int, nbytes: int) -> int:
    return total // RESERVE_SHARE + OPTIMIZER_COPIES * nbytes


def choose_place(asked: SnapshotPlace | None, memory: Memory, nbytes: int) -> SnapshotPlace:
    """Return where a snapshot of ``nbytes`` goes: as asked, else the device if it fits there."""
    if asked is not None:
        return asked
    fits = memory.free - nbytes >= reserve_nbytes(memory.total, nbytes)
    return "device" if fits else "host"


class Kept(NamedTuple):
    slab: Tensor
    at: int
    numel: int
    resident: bool

    @property
    def bits(self) -> Tensor:
        return self.slab[self.at : self.at + self.numel]


@dataclass(slots=True)
class Slabs:
    """Allocator of slabs: tensors of one width lie side by side in the order they are taken."""

    left: dict[int, int]
    _open: dict[tuple[torch.device, int], tuple[Tensor, int]] = field(default_factory=dict)

    def take(
        self, numel: int, width: int, where: torch.device, *, resident: bool, pinned: bool
    ) -> Kept:
        key, size = (where, width), aligned(numel, width)
        slab, used = self._open.get(key, (None, 0))
        if slab is None or used + size > slab.numel():
            expected = min(SLAB_NBYTES // width, self.left.get(width, 0))
            kind = torch_kernels.INT_DTYPES[width]
            slab, used = torch.empty(max(size, expected), dtype=kind, device=where), 0
            if pinned:
                torch_kernels.pin_(slab)
        self.left[width] = max(0, self.left.get(width, 0) - size)
        self._open[key] = slab, used + size
        return Kept(slab, used, numel, resident)


class SnapshotFile:
    """Room for a snapshot in a mapped file without a name, which is gone with the process."""

    def __init__(self, nbytes: int) -> None:
        folder = tempfile.gettempdir()
        try:
            with tempfile.NamedTemporaryFile(prefix="deltachain-snapshot-") as file:
                reserve(Path(file.name), nbytes)  # a write to a mapped page cannot fail
                self._bytes = np.frombuffer(mmap(file.fileno(), nbytes), np.uint8)
        except OSError as exc:
            raise ConfigError(
                f"snapshot='disk': {exc}",
                hint=hint_for(exc, Path(folder)) or "set TMPDIR to a folder on a local disk",
            ) from exc
        self._used = 0

    def take(self, numel: int, width: int) -> Kept:
        start, self._used = self._used, self._used + aligned(numel, width) * width
        bits = self._bytes[start : start + numel * width].view(
            "<u1" if width == 1 else f"<i{width}"
        )
        return Kept(torch.from_numpy(bits), 0, numel, resident=False)


def aligned(numel: int, width: int) -> int:
    unit = ALIGNMENT // width
    return -(-numel // unit) * unit


def wait_for_writes(slab: Tensor) -> None:
    """Wait for writes to a slab by this thread, so that other streams and threads may read it."""
    streams = CopyStream(slab.device)
    streams.wait(streams.mark())


def read(bits: Tensor) -> Tensor:
    """Copy ``(n,)`` bits from a device to the host, after :func:`wait_for_writes` to them.

    The stream of the caller is not used, since a step may be under way there.
    """
    streams = CopyStream(bits.device)
    whole = torch.empty(bits.numel(), dtype=bits.dtype)
    buffer = streams.room(min(bits.numel(), READ_NUMEL), bits.dtype)
    for at in range(0, bits.numel(), READ_NUMEL):
        chunk = bits[at : at + READ_NUMEL]
        with streams.copying():
            buffer[: chunk.numel()].copy_(chunk, non_blocking=True)
            copied = streams.mark_copies()
        streams.wait(copied)
        whole[at : at + chunk.numel()] = buffer[: chunk.numel()]
    return whole


def _compared(weight: Weight, kept: Kept) -> Compared:
    spec = weight.spec
    wanted = TORCH_DTYPES[spec.dtype]
    return Compared(spec.name, kept.slab, kept.at, weight.tensor, wanted, kept.resident)


def _copied(weight: Weight) -> Weight:
    """Return a copy of a frozen weight, for any thread while the trainer goes on.

    On the host in pieces, each after a look at the storage: its owner may free it or move it.
    """
    live = weight.tensor
    refuse_tensor(weight.spec.name, live)
    if not torch_kernels.on_host(live):
        return replace(weight, tensor=live.clone())
    made = torch.empty_like(live)
    target = _unsigned(torch_kernels.bits_of(made)).data
    for at in range(0, live.numel(), PIECE):
        refuse_tensor(weight.spec.name, live)
        source = _unsigned(torch_kernels.bits_of(live)).data
        target[at : at + PIECE] = source[at : at + PIECE]
    return replace(weight, tensor=made)


def wire_bits(weight: Weight) -> Bits:
    """Return flat bits of a live weight in its wire dtype; shares memory if no cast is needed."""
    return _unsigned(_bits_there(weight).cpu())


def _bits_there(weight: Weight) -> Tensor:
    return torch_kernels.bits_of(cast_to(weight.spec.dtype, weight.tensor.detach()))


def _unsigned(bits: Tensor) -> Bits:
    return torch_kernels.host_array(bits, f"<u{bits.element_size()}")


class _Window(NamedTuple):
    weight: Weight
    window: AdjacentRuns
    bits: Bits
    live: Bits | None
    digest: StateDigest | None = None  # if it was computed on the weight's device


class _Digested(NamedTuple):
    """Number and state digest of a weight's elements of a checkpoint tensor, as far as digested."""

    numel: int = 0
    digest: StateDigest = StateDigest()


class _Frozen(NamedTuple):
    digest: StateDigest
    weight: Weight
    address: int

    @classmethod
    def of(cls, weight: Weight, digest: StateDigest) -> "_Frozen":
        tensor = weight.tensor.detach()
        return cls(digest, replace(weight, tensor=tensor), tensor.data_ptr())

    def may_differ(self, weight: Weight) -> bool:
        """Return whether the live weight was written in place, or is in other memory."""
        storages = (one.tensor.untyped_storage()._cdata for one in (self.weight, weight))
        return (
            len(set(storages)) > 1
            or weight.tensor.data_ptr() != self.address
            or weight.writes != self.weight.writes
        )


class Snapshot:
    """Last published bits of all trainable weights, and digests of the others. Not thread-safe."""

    def __init__(
        self, source: ModelTensors, *, where: SnapshotPlace | None = None, on_device: bool = False
    ) -> None:
        self._source = source
        self._asked: SnapshotPlace | None = where
        self._on_device = on_device  # compares weights on the host as those on a device
        self._kept: dict[str, Kept] = {}
        self._places: dict[torch.device, SnapshotPlace] = {}
        self._diffs: dict[torch.device, DeviceDiff] = {}
        self._state = StateDigest()
        self._digested: dict[tuple[str, str], _Digested] = {}  # until the first change
        self._frozen: dict[str, _Frozen] = {}
        self._files = {one.spec.name: one for one in source.weights if one.file is not None}
        self._in_turn = ""
        self._pending: Diff | None = None  # the newest diff, if its changes are not found yet
        self.on_change: Callable[[Mapping[str, Changes]], None] = lambda _: None
        trained = [weight for weight in source.weights if not weight.frozen]
        sizes = Counter[int]()
        for weight in trained:
            sizes[weight.spec.itemsize] += aligned(
                weight.element_map.box.numel, weight.spec.itemsize
            )
        self._nbytes = sum(width * numel for width, numel in sizes.items())
        slabs = Slabs(sizes)
        is_on_disk = where == "disk" and self._nbytes > 0
        self._file = SnapshotFile(self._nbytes) if is_on_disk else None
        logger.info(
            "comparing with a snapshot of %.1f GiB%s",
            self._nbytes / 2**30,
            f", in a file in {tempfile.gettempdir()}" if is_on_disk else "",
        )
        with Pool(cores()) as pool:
            ahead = 1 if source.one_by_one else 4 * cores()
            windows = self._windows(slabs)
            for weight, window, digest in pool.ordered(
                _fill, windows, ahead=ahead, small=lambda one: len(one.window.indices) < SMALL_NUMEL
            ):
                self._state += digest
                name = weight.spec.name
                if weight.frozen:
                    so_far = self._frozen.get(name)
                    self._note(weight, digest if so_far is None else so_far.digest + digest)
                else:
                    numel, total = self._digested.get((name, window.spec.name), _Digested())
                    numel += len(window.indices)
                    self._digested[name, window.spec.name] = _Digested(numel, total + digest)
        frozen = {name: one.weight.element_map.box for name, one in self._frozen.items()}
        self._turns = cycle([name for name, box in frozen.items() if box.numel <= TURN_NUMEL])
        if where == "device" and trained and not self._diffs:
            raise ConfigError(
                "snapshot='device', and all weights are compared on the host",
                hint="leave snapshot out: only weights on a CUDA device with Triton can have it",
            )

    @property
    def kernel(self) -> str:
        return "device" if self._on_device or self._diffs else "numba"

    @property
    def state(self) -> StateDigest:
        """State digest of this rank's weights, frozen ones too."""
        self.settle()
        return self._state

    def bits(self, weight: Weight) -> Bits:
        """Return the last published flat bits of one weight, a copy of those on a device."""
        if weight.spec.name in self._kept:
            return self.compared(weight.spec.name)
        if weight.spec.name in self._files:
            return self.reader(weight)(slice(0, weight.spec.numel))
        return wire_bits(_copied(self._frozen[weight.spec.name].weight))

    def compared(self, name: str) -> Bits:
        """Return the last published flat bits of a weight that is not frozen."""
        self.settle()
        return _on_host(self._kept[name])

    def reader(self, weight: Weight) -> Callable[[Any], Bits]:
        """Return a function of a selection of one weight's last published flat bits.

        It selects slices only of a weight in a file, of which it reads no more.
        """
        file = self._files.get(weight.spec.name)
        return self.bits(weight).__getitem__ if file is None else partial(_of_file, file)

    def known_digest(self, weight: Weight, window: AdjacentRuns) -> StateDigest | None:
        """Return the state digest of a window, if it is whole and has not changed yet."""
        self.settle()
        digested = self._digested.get((weight.spec.name, window.spec.name), _Digested())
        return digested.digest if digested.numel == len(window.indices) else None

    def _note(self, weight: Weight, digest: StateDigest) -> None:
        """Keep what is known of a frozen weight; of one in a file no tensor, which is memory."""
        name = weight.spec.name
        self._frozen[name] = _Frozen.of(self._files.get(name, weight), digest)

    def _check_frozen(self, weight: Weight) -> None:
        """Raise if a weight that is not compared has other bits than those published.

        Bits are read again if it was written in place or is in other memory. Writes by ``.data``
        are not counted, so that one weight of moderate size is read in each diff, in turn.
        """
        known = self._frozen.get(weight.spec.name)
        if known is None or not (known.may_differ(weight) or weight.spec.name == self._in_turn):
            return
        bits = wire_bits(weight)
        windows = weight.element_map.windows(WINDOW_NUMEL)
        digests = (digest_window(one, bits[one.select]) for one in windows)
        if sum(digests, StateDigest()) != known.digest:
            raise UnsupportedModelError(
                f"{weight.spec.name!r} did not require a gradient when the publisher was attached, "
                "and was changed since",
                hint="of a model whose weights are not changed by optimizers alone, such as one "
                f"with a momentum encoder, {COMPARED_WHOLE}",
            )
        self._note(weight, known.digest)

    def diff_(self) -> Diff:
        """Take the changes since the last call, all or nothing; then weights may change again.

        The diff finds, divides and digests them when it is first used, and advances the snapshot.
        The call after this one does, at the latest; ``on_change`` is told the changes then.
        """
        self.settle()
        found: dict[str, Changes] = {}
        landings: list[Landing] = []
        self._in_turn = next(self._turns, "")
        try:
            for weight in self._source.live_weights():
                kept = self._kept.get(weight.spec.name)
                if kept is not None:
                    self._diff(weight, kept, found)
                else:
                    self._check_frozen(weight)
            landings += (one.land() for one in self._diffs.values())
        except BaseException:
            for one in self._diffs.values():
                one.drop()
                landings.append(one.land())
            for landing in landings:
                landing.complete(found)
            self._put_back(found)
            raise
        nnz = sum(changes.indices.size for changes in found.values())
        nnz += sum(landing.nnz for landing in landings)
        find = partial(map_landed, landings, found, self._source.weights)
        self._pending = Diff(nnz, find, self._advance)
        return self._pending

    def _advance(self, mapped: Mapped) -> None:
        if mapped.live:
            self._digested.clear()
            self.on_change(mapped.live)
        self._state += mapped.digest

    def settle(self) -> None:
        """Find the changes of the newest diff, if nobody did."""
        pending = self._pending
        if pending is not None:
            pending.complete()
            self._pending = None

    def restore(self, diff: Diff) -> None:
        self.settle()
        self._state -= diff.digest
        self._put_back(diff.live)

    def redo(self, diff: Diff) -> None:
        self.settle()
        self._state += diff.digest
        for name, changes in diff.live.items():
            _write_(self._kept[name], changes.indices, changes.new)

    def _put_back(self, live: Mapping[str, Changes]) -> None:
        for name, changes in live.items():
            _write_(self._kept[name], changes.indices, changes.old)

    def _windows(self, slabs: Slabs) -> Iterator[_Window]:
        is_checkpoint = len(self._files) == len(self._source.weights)
        for weight in self._files.values() if is_checkpoint else self._source.live_weights():
            live, bits = None, np.empty(0, weight.spec.bits_dtype)
            if weight.file is not None:
                windows = weight.element_map.windows(FILE_NUMEL)
                yield from (_Window(weight, window, bits, None) for window in windows)
                continue
            if weight.frozen:
                bits = wire_bits(weight)
            elif self._compares(weight):
                kept, there = self._keep_of_device(weight, slabs)
                if weight.element_map.axes is None:  # else neighbours are in different windows
                    for window in weight.element_map.windows(DEVICE_WINDOW_NUMEL):
                        yield _Window(weight, window, bits, None, _digest_there(window, there))
                    continue
                bits = _on_host(kept)
            else:
                bits, live = self._keep(weight)
            for window in weight.element_map.windows(WINDOW_NUMEL):
                yield _Window(weight, window, bits, live)

    def _keep(self, weight: Weight) -> tuple[Bits, Bits | None]:
        """Take room for a weight on the host; return it, and live bits still to be copied there."""
        spec = weight.spec
        if self._file is not None:
            kept = self._kept[spec.name] = self._file.take(
                weight.element_map.box.numel, spec.itemsize
            )
            bits = _on_host(kept)
            bits[...] = wire_bits(weight)
            return bits, None
        bits, live = _room_on_host(weight)
        signed = bits if bits.itemsize == 1 else bits.view(f"<i{bits.itemsize}")
        numel = weight.element_map.box.numel
        self._kept[spec.name] = Kept(torch.from_numpy(signed), 0, numel, resident=False)
        return bits, live

    def _keep_of_device(self, weight: Weight, slabs: Slabs) -> tuple[Kept, Tensor]:
        """Copy a weight into the snapshot; return its room, and its bits on its device."""
        device_of, there = weight.tensor.device, _bits_there(weight)
        numel, width = weight.element_map.box.numel, weight.spec.itemsize
        resident = self._place(device_of) == "device"
        where = device_of if resident else torch.device("cpu")
        pinned = device_of.type == "cuda" and not resident
        if self._file is not None:
            kept = self._file.take(numel, width)
        else:
            kept = slabs.take(numel, width, where, resident=resident, pinned=pinned)
        kept.bits.copy_(there)
        wait_for_writes(kept.slab)
        self._diff_on(device_of).expect(_compared(weight, kept).kind, numel)
        self._kept[weight.spec.name] = kept
        return kept, there

    def _place(self, where: torch.device) -> SnapshotPlace:
        if where not in self._places:
            memory = Memory(0, 0)
            if where.type == "cuda":
                memory = Memory(*torch.cuda.mem_get_info(where))
            self._places[where] = choose_place(self._asked, memory, self._nbytes)
            logger.info(
                "the snapshot of weights on %s is in %s memory: it has %d bytes, and the device "
                "%d free, of which %d are reserved",
                where,
                {"host": "pinned host", "disk": "mapped"}.get(self._places[where], "device"),
                self._nbytes,
                memory.free,
                reserve_nbytes(memory.total, self._nbytes),
            )
        return self._places[where]

    def _compares(self, weight: Weight) -> bool:
        tensor, wire = weight.tensor, TORCH_DTYPES[weight.spec.dtype]
        return self._on_device or compares_on(tensor.device, tensor.dtype, wire)

    def _diff_on(self, where: torch.device) -> DeviceDiff:
        if where not in self._diffs:
            self._diffs[where] = DeviceDiff(where)
        return self._diffs[where]

    def _diff(self, weight: Weight, kept: Kept, found: dict[str, Changes]) -> None:
        where = weight.tensor.device
        if kept.resident and where != kept.slab.device:  # moved since the attach
            where = kept.slab.device
            weight = replace(weight, tensor=weight.tensor.detach().to(where))
        elif not kept.resident and not self._compares(weight):
            if not torch_kernels.on_host(weight.tensor):
                weight = replace(weight, tensor=weight.tensor.detach().to("cpu"))
            tensor, bits = weight.tensor.detach(), _unsigned(kept.bits)
            if tensor.dtype == torch.float32 and weight.spec.dtype == "BF16":
                changes = host.cast_diff_(
                    bits, torch_kernels.host_array(tensor.view(-1), np.float32)
                )
            else:
                changes = host.diff_(bits, wire_bits(weight))
            if changes.indices.size:
                found[weight.spec.name] = changes
            return
        one = self._diff_on(where)
        one.add(_compared(weight, kept))
        if self._source.one_by_one:
            one.settle(found)


def _room_on_host(weight: Weight) -> tuple[Bits, Bits | None]:
    """Return memory for a weight on the host, and live bits still to be copied there."""
    bits = wire_bits(weight)
    if weight.tensor.dtype != TORCH_DTYPES[weight.spec.dtype]:
        return bits, None  # the cast made new memory, with the bits in it
    if weight.element_map.axes is not None:
        return threaded.copy(bits), None  # neighbours are in different windows
    return slab.empty(bits.size, bits.dtype), bits


def _fill(one: _Window) -> tuple[Weight, AdjacentRuns, StateDigest]:
    """Copy a window into the snapshot if it is not there; return it with its state digest."""
    select = one.window.select
    if one.digest is not None:
        return one.weight, one.window, one.digest
    if one.weight.file is not None:
        return one.weight, one.window, digest_window(one.window, _of_file(one.weight, select))
    if one.live is not None:
        one.bits[select] = one.live[select]
    return one.weight, one.window, digest_window(one.window, one.bits[select])


def _digest_there(window: AdjacentRuns, bits: Tensor) -> StateDigest:
    """Compute the state digest of consecutive elements on the device of their bits."""
    key, indices = digest_key(window.spec), window.indices
    mine = bits[window.select]
    if isinstance(indices, range):
        return torch_kernels.digest(key, mine, indices.start)
    return torch_kernels.digest_at(key, torch_kernels.receive(indices, mine), mine)


def _of_file(weight: Weight, select: Any) -> Bits:  # noqa: ANN401 - a slice
    if weight.file is None:
        raise AssertionError(f"{weight.spec.name} is in no file")
    values = weight.file(select.start, select.stop)
    refuse_scale(weight.spec, values)
    return _unsigned(torch_kernels.bits_of(values))


def _on_host(kept: Kept) -> Bits:
    return _unsigned(kept.bits if torch_kernels.on_host(kept.slab) else read(kept.bits))


def _write_(kept: Kept, indices: Indices, bits: Bits) -> None:
    if torch_kernels.on_host(kept.slab):
        host.scatter_(_unsigned(kept.bits), indices, bits)
    else:
        there = (torch_kernels.receive(array, kept.slab) for array in (indices, bits))
        torch_kernels.scatter_(kept.bits, *there)
        wait_for_writes(kept.slab)

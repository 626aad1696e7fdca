"""Choice of the encoding whose versions subscribers have first, by the speed of the link.

A smaller encoding costs more time to encode and to decode; on a fast link that time is lost. The
functions are pure: a publisher gives what it measured. A chain keeps its encoding until another one
is faster by a margin, so that noise does not switch it back and forth.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Final

from deltachain.chain.upload import MeasuredTransfer
from deltachain.codec import ENCODINGS, Part, encode_part
from deltachain.codec.encode import BUCKET
from deltachain.codec.encodings import Encoding, OldBits
from deltachain.errors import ConfigError
from deltachain.publish.config import AUTO
from deltachain.publish.wire_form import CheckpointChanges, Diff, sparse_change
from deltachain.threads import cores

"""Name in the settings of a publisher that lets the link decide."""

CROSSINGS: Final = 2
"""Times that a change crosses the link: into the store, and out of it."""

SMALLEST_TRANSFER: Final = 1 << 20
"""Bytes below which a transfer says more of round trips than of the link."""

MARGIN: Final = 0.9
"""Share of the time of the present encoding below which another one replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingCost:
    """Cost of one change in one encoding.

    Attributes:
        encoding: Name of the encoding.
        nbytes: Size on the wire, in bytes a change.
        encode_ns: Time to encode, in nanoseconds a change.
        decode_ns: Time to decode, in nanoseconds a change.

    Raises:
        ConfigError: A cost is negative.
    """

    encoding: str
    nbytes: float
    encode_ns: float
    decode_ns: float

    def __post_init__(self) -> None:
        if min(self.nbytes, self.encode_ns, self.decode_ns) < 0:
            raise ConfigError(f"encoding {self.encoding!r}: a cost must not be negative")

    @property
    def cpu_ns(self) -> float:
        """Time to encode and to decode, in nanoseconds a change."""
        return self.encode_ns + self.decode_ns

    def serve_ns(self, bytes_per_s: float) -> float:
        """Time from the diff until a subscriber has the decoded change, in nanoseconds a change.

        Uploads and downloads are taken to be equally fast, and each stage to begin when the one
        before has ended.
        """
        return self.cpu_ns + CROSSINGS * self.nbytes / bytes_per_s * 1e9


@dataclass(frozen=True, slots=True)
class EncodingChoice:
    """The encoding to use, and what decided it.

    Attributes:
        encoding: Name of the encoding.
        serve_ns: Nanoseconds a change until a subscriber has it, by encoding; empty where nothing
            was measured.
        bytes_per_s: Speed of the link; ``None`` where it is not known.
    """

    encoding: str
    serve_ns: Mapping[str, float] = field(default_factory=dict)
    bytes_per_s: float | None = None

    @property
    def reason(self) -> str:
        """What decided it, in words: ``link of 2.5 MB/s, step 1,130 ns a change, max 960``."""
        if self.bytes_per_s is None:
            return "link not measured yet"
        link = f"link of {self.bytes_per_s / 1e6:,.3g} MB/s"
        times = [f"{name} {ns:,.0f}" for name, ns in self.serve_ns.items()]
        return ", ".join([link, f"{times[0]} ns a change", *times[1:]]) if times else link


def shows_link(transfer: MeasuredTransfer) -> bool:
    """Return whether a transfer is large enough to show the speed of the link."""
    return transfer.nbytes >= SMALLEST_TRANSFER and transfer.seconds > 0


def link_speed(transfers: Iterable[MeasuredTransfer]) -> float | None:
    """Return the speed of the link in bytes a second, or None if no transfer shows it.

    It is that of the fastest transfer of at least 1 MiB: other traffic and round trips make one
    slower than the link, and nothing makes it faster.
    """
    speeds = (one.nbytes / one.seconds for one in transfers if shows_link(one))
    return max(speeds, default=None)


def fastest_encoding(
    costs: Iterable[EncodingCost], bytes_per_s: float | None, *, otherwise: str = "step"
) -> EncodingChoice:
    """Choose the encoding whose versions are served first.

    Args:
        costs: Measured costs, one an encoding; of equally fast ones the first is chosen.
        bytes_per_s: Speed of the link (`link_speed`), or None if it is not known.
        otherwise: Choice where costs or link are not known.

    Raises:
        ConfigError: The speed is not positive.
    """
    if bytes_per_s is not None and bytes_per_s <= 0:
        raise ConfigError(f"a link of {bytes_per_s} bytes a second: expected a positive number")
    if bytes_per_s is None:
        return EncodingChoice(otherwise)
    serve_ns = {cost.encoding: cost.serve_ns(bytes_per_s) for cost in costs}
    fastest = min(serve_ns, key=serve_ns.__getitem__, default=otherwise)
    return EncodingChoice(fastest, serve_ns, bytes_per_s)


def next_encoding(
    present: str, costs: Iterable[EncodingCost], bytes_per_s: float | None
) -> EncodingChoice:
    """Choose the encoding of the next versions: the present one, or one that is clearly faster.

    Another one is chosen if it takes less than ``MARGIN`` of the time of the present one, or if the
    present one was not measured.

    Args:
        present: Encoding of the last version.
        costs: Measured costs, one an encoding.
        bytes_per_s: Speed of the link (`link_speed`), or None if it is not known.

    Raises:
        ConfigError: The speed is not positive.
    """
    choice = fastest_encoding(costs, bytes_per_s, otherwise=present)
    fastest, kept = choice.serve_ns.get(choice.encoding), choice.serve_ns.get(present)
    if fastest is None or kept is None or fastest < MARGIN * kept:
        return choice
    return replace(choice, encoding=present)


def may_be_replaced(cost: EncodingCost, bytes_per_s: float) -> bool:
    """Return whether an encoding of half the bytes, at equal work, would be chosen instead.

    ``max`` takes more than half the bytes of ``step``, at more work: where this is false, it need
    not be tried.
    """
    half = replace(cost, nbytes=cost.nbytes / 2)
    return half.serve_ns(bytes_per_s) < MARGIN * cost.serve_ns(bytes_per_s)


MOST_NUMEL: Final = 1 << 24
"""Most elements of the tensor that stands for all others, if there is one as small."""

RUNS: Final = 2
"""Runs of a trial, of which the fastest counts: the first may compile kernels."""


def sample_of(diff: Diff) -> CheckpointChanges | None:
    """Return the changed tensor that stands for all; ``None`` if nothing changed.

    It is that with the most changes of those that are small enough to be tried in a moment, else
    the smallest.
    """
    small = [one for one in diff.by_tensor if one.spec.numel <= MOST_NUMEL]
    if small:
        return max(small, key=lambda one: one.changes.indices.size)
    return min(diff.by_tensor, key=lambda one: one.spec.numel, default=None)


def encoder_threads(diff: Diff) -> int:
    """Return how many threads encode a diff, and are taken to decode it."""
    numel = sum(one.spec.numel for one in diff.by_tensor)
    return min(cores(), -(-numel // BUCKET))


def try_encoding(
    name: str, sample: CheckpointChanges, held: Callable[[], OldBits] | None, *, threads: int
) -> EncodingCost:
    """Encode and decode the changes of a tensor; return the cost of one.

    Args:
        name: Name of the encoding.
        sample: Changes of the tensor.
        held: Function that reads the bits after the change, as for
            :func:`~deltachain.publish.wire_form.sparse_change`.
        threads: Threads among which the work on all tensors is divided.
    """
    encode_s, decode_s, nbytes = [], [], 0
    for _ in range(RUNS):
        start = time.perf_counter()
        change = sparse_change(sample, None, encoding=ENCODINGS.get(name), held=held)
        content = encode_part([change]).content
        encoded = time.perf_counter()
        old = change.old() if change.old else None
        before = time.perf_counter()
        part = Part.from_bytes(content)
        part.verify()
        part.read(sample.spec.name, old=old).validate()
        decode_s.append(time.perf_counter() - before)
        encode_s.append(encoded - start)
        nbytes = len(content)
    nnz = sample.changes.indices.size
    ns = 1e9 / nnz / threads
    return EncodingCost(
        encoding=name,
        nbytes=nbytes / nnz,
        encode_ns=min(encode_s) * ns,
        decode_ns=min(decode_s) * ns,
    )


logger = logging.getLogger(__name__)

FIRST: Final = "step"
"""Encoding of versions until the link is known."""

OTHERS: Final = ("max",)
"""Encodings that may replace the first."""

VERSIONS: Final = 16
"""Versions that a choice lasts for."""

TRANSFERS: Final = 8
"""Newest transfers that show the link."""


class VersionEncoding:
    """Encoding of each version of a publisher; with ``auto``, it is chosen anew now and then.

    The first versions are ``step``. As soon as a transfer of 1 MiB or more has shown the link, one
    changed tensor is encoded and decoded in ``step`` and, where fewer bytes may pay, in ``max``;
    the one that a subscriber has first is used if it takes less than ``MARGIN`` of the time of the
    present one. A choice lasts ``VERSIONS`` versions, and the link is that of the newest
    ``TRANSFERS`` transfers.

    Whether every reader of the chain can read ``max`` is not known here: who sets ``auto`` says so.

    Args:
        wanted: Name of an encoding, or ``auto``.

    Attributes:
        is_auto: Whether the link decides.
        present: The present choice.

    Raises:
        ConfigError: The encoding is unknown, or stores whole tensors.
    """

    def __init__(self, wanted: str) -> None:
        self.is_auto = wanted == AUTO
        self.present = EncodingChoice(FIRST if self.is_auto else ENCODINGS.chosen(wanted).name)
        self._left = 0
        self._lock = Lock()  # of the transfers: anchors are uploaded beside versions
        self._transfers: deque[MeasuredTransfer] = deque(maxlen=TRANSFERS)

    @property
    def encoding(self) -> Encoding:
        """Encoding of the present choice."""
        return ENCODINGS.get(self.present.encoding)

    def add(self, transfer: MeasuredTransfer) -> None:
        """Note what crossed the link, if it is large enough to show its speed. Thread-safe."""
        if shows_link(transfer):
            with self._lock:
                self._transfers.append(transfer)

    def choose(
        self, diff: Diff, held: Callable[[CheckpointChanges], Callable[[], OldBits] | None]
    ) -> EncodingChoice:
        """Choose the encoding of a version.

        Args:
            diff: Changes of the version.
            held: Function that returns what reads the bits of a changed tensor after the change.
        """
        sample = sample_of(diff)
        with self._lock:
            speed = link_speed(self._transfers)
        if not self.is_auto or sample is None or speed is None:
            return self.present
        if self._left:
            self._left -= 1
            return self.present
        self._left = VERSIONS - 1
        threads, bits = encoder_threads(diff), held(sample)
        costs = [try_encoding(FIRST, sample, bits, threads=threads)]
        if self.present.encoding != FIRST or may_be_replaced(costs[0], speed):
            costs += [try_encoding(name, sample, bits, threads=threads) for name in OTHERS]
        self.present = next_encoding(self.present.encoding, costs, speed)
        logger.info("encoding %s: %s", self.present.encoding, self.present.reason)
        return self.present

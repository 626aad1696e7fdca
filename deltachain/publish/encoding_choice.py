"""Choice of the encoding whose versions subscribers have first, by the speed of the link.

A smaller encoding costs more time to encode and to decode; on a fast link that time is lost. The
functions are pure: a publisher gives what it measured. A chain keeps its encoding until another one
is faster by a margin, so that noise does not switch it back and forth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from deltachain.chain.upload_clock import MeasuredTransfer
from deltachain.errors import ConfigError

AUTO: Final = "auto"
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

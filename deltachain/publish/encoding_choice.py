"""Choice of the encoding whose versions subscribers have first, by the speed of the link.

A smaller encoding costs more time to encode and to decode; on a fast link that time is lost. The
functions are pure: a publisher gives what it measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from deltachain.errors import ConfigError

CROSSINGS: Final = 2
"""Times that a change crosses the link: into the store, and out of it."""

SMALLEST_UPLOAD: Final = 1 << 20
"""Bytes below which an upload says more of round trips than of the link."""


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
    """

    encoding: str
    serve_ns: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MeasuredUpload:
    """One upload of a publisher: its size in bytes, and its duration in seconds."""

    nbytes: int
    seconds: float


def link_speed(uploads: Iterable[MeasuredUpload]) -> float | None:
    """Return the speed of the link in bytes a second, or None if no upload shows it.

    It is that of the fastest upload of at least 1 MiB: other traffic and round trips make an upload
    slower than the link, and nothing makes it faster.
    """
    speeds = (
        upload.nbytes / upload.seconds
        for upload in uploads
        if upload.nbytes >= SMALLEST_UPLOAD and upload.seconds > 0
    )
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
        return EncodingChoice(otherwise, {})
    serve_ns = {cost.encoding: cost.serve_ns(bytes_per_s) for cost in costs}
    return EncodingChoice(min(serve_ns, key=serve_ns.__getitem__, default=otherwise), serve_ns)

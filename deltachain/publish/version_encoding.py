"""Encoding of each version: as configured, or chosen by the link."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Final

from deltachain.chain.upload_clock import MeasuredTransfer
from deltachain.codec import ENCODINGS
from deltachain.codec.encodings import Encoding, OldBits
from deltachain.publish.diff import CheckpointChanges, Diff
from deltachain.publish.encoding_choice import (
    AUTO,
    EncodingChoice,
    link_speed,
    may_be_replaced,
    next_encoding,
    shows_link,
)
from deltachain.publish.encoding_trial import encoder_threads, sample_of, try_encoding

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

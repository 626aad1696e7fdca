"""Wire form of a changed tensor: its changes, a window, or all its bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from deltachain.chain.upload import DENSE_SHARE
from deltachain.codec import Change
from deltachain.codec.encodings import Encoding
from deltachain.codec.encodings.overwrite import OverwriteEncoding
from deltachain.codec.encodings.step import StepEncoding
from deltachain.codec.old_bits import OldBits
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.format.digest import digest_key
from deltachain.kernels import host, threaded
from deltachain.kernels.reference import Changes
from deltachain.publish.model.layout import AdjacentRuns
from deltachain.types import Bits, StateDigest, TensorSpec


class ChangedTensor(Protocol):
    """Changes of one checkpoint tensor, and the change of the state digest by them."""

    @property
    def spec(self) -> TensorSpec:
        """Spec of the tensor."""

    @property
    def changes(self) -> Changes:
        """Changes by flat indices into the tensor."""

    @property
    def digest(self) -> StateDigest:
        """Change of the state digest."""


def sparse_change(
    found: ChangedTensor,
    bits: Callable[[], Bits] | None,
    *,
    encoding: Encoding,
    held: Callable[[], OldBits] | None = None,
) -> Change:
    """Return the smaller wire form of a changed tensor: its changes, or all its bits.

    Args:
        found: Changes of the tensor.
        bits: Function that reads all bits of the tensor after the change, from a device perhaps;
            ``None`` if other ranks have some of them.
        encoding: Encoding of changes; ``overwrite`` replaces ``step`` if smaller, and ``step`` an
            encoding that needs old bits.
        held: Function that reads the bits after the change of consecutive elements, all changed
            ones among them; without it, and of tensors that an encoding with old bits does not
            suit, ``step`` replaces that.
    """
    spec, changes = found.spec, found.changes
    if not encoding.suits(spec) or (held is None and encoding.encodes_with_old(spec)):
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
    if encoding.encodes_with_old(spec) and held is not None:
        before = partial(_bits_before, changes, held)
    return Change(delta, found.digest, encoding=encoding, old=before, may_be_step=True)


def _bits_before(changes: Changes, held: Callable[[], OldBits]) -> OldBits:
    after = held()
    bits = after.bits.copy()
    bits[changes.indices - after.start] = changes.old
    return OldBits(bits, after.start)


def dense_change(spec: TensorSpec, bits: Bits) -> Change:
    """Return a change of all bits of one tensor."""
    return Change(TensorDelta.dense(spec, bits), host.digest(digest_key(spec), bits))


def digest_window(window: AdjacentRuns, bits: Bits) -> StateDigest:
    """Compute the state digest of a window; ``bits`` is the rank's whole shard of the tensor."""
    key, mine = digest_key(window.spec), bits[window.select]
    if isinstance(window.indices, range):
        return threaded.digest(key, mine, window.indices.start)
    return host.digest_at(key, window.indices, mine)


def window_change(window: AdjacentRuns, bits: Bits, digest: StateDigest | None = None) -> Change:
    """Return a change of a window.

    Args:
        window: The window.
        bits: The rank's whole shard of the tensor.
        digest: State digest of the window, if it is known.
    """
    spec, indices = window.spec, window.indices
    digest = digest_window(window, bits) if digest is None else digest
    if isinstance(indices, range):
        if len(indices) == spec.numel:
            return Change(TensorDelta.dense(spec, bits[window.select]), digest)
        indices = np.arange(indices.start, indices.stop)
    mine = bits[window.select]
    delta = TensorDelta(spec=spec, indices=indices, values=mine, absolute=ABSOLUTE)
    return Change(delta, digest, windows=True)

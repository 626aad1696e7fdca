"""Trial of an encoding on one changed tensor: what a change costs in it on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from deltachain.codec import ENCODINGS, Part, encode_part
from deltachain.codec.encode import BUCKET
from deltachain.codec.old_bits import OldBits
from deltachain.publish.diff import CheckpointChanges, Diff
from deltachain.publish.encoding_choice import EncodingCost
from deltachain.publish.wire_form import sparse_change
from deltachain.threads import cores

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

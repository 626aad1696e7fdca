"""Digests that consecutive rows of ``max`` share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from deltachain.codec import ENCODINGS, Change, Part, encode_part
from deltachain.codec.container import TensorRow
from deltachain.codec.rows import (
    SHARED_NUMEL,
    RowDigests,
    changes_of,
    check_digests,
    groups,
    share,
)
from deltachain.delta import OldBits, changes
from deltachain.errors import ConfigError, DigestMismatchError, MalformedError
from deltachain.format.keys import digest_key
from deltachain.kernels import host as kernel_host
from deltachain.kernels.protocol import digest_change
from deltachain.replica.unused_state import UnusedState
from deltachain.types import Bits, StateDigest, TensorSpec
from deltachain.verify import Weights
from tests.format import stranger
from tests.format.forge import take_apart
from tests.format.stranger import RefusedError
from tests.support.values import present

NAMES = ("h.0.a", "h.0.b", "h.0.c", "h.1.a", "h.1.b")
SPECS = tuple(TensorSpec(name, "BF16", (64, 32)) for name in NAMES)


def digest(number: int) -> StateDigest:
    return StateDigest(number, 2**64 - number)


def row(name: str, number: int, *, encoding: str = "max", numel: int = 10) -> TensorRow:
    return TensorRow(
        name=name,
        dtype="BF16",
        shape=(numel,),
        encoding=encoding,
        bucket=0,
        gap=1,
        nnz=1,
        segments=1,
        digest=str(digest(number)) if number else "",
    )


def told(rows: list[TensorRow]) -> list[str]:
    return [one.digest and str(StateDigest.parse(one.digest).lane0) for one in rows]


def test_tensors_of_a_layer_leave_their_digests_to_the_last() -> None:
    rows = [row(name, number) for number, name in enumerate(NAMES, 1)]
    assert told(share(rows)) == ["", "", "6", "", "9"]
    assert [len(group) for group in groups(share(rows))] == [3, 2]


def test_rows_of_other_encodings_lie_between() -> None:
    rows = [row("h.0.a", 1), row("h.0.s", 7, encoding="step"), row("h.0.b", 2), row("h.1.a", 3)]
    found = share(rows)
    assert told(found) == ["", "7", "3", "3"]
    assert [[one.name for one in group] for group in groups(found)] == [
        ["h.0.s"],
        ["h.0.a", "h.0.b"],
        ["h.1.a"],
    ]


def test_other_encodings_names_without_a_layer_and_large_tensors_keep_theirs() -> None:
    assert told(share([row("h.0.a", 1), row("h.0.b", 2, encoding="step"), row("h.0.c", 3)])) == [
        "",
        "2",
        "4",
    ]
    assert told(share([row("embed", 1), row("embed.x", 2), row("h.10.a", 3)])) == ["1", "2", "3"]
    assert told(share([row("h.1.a", 1), row("h.10.b", 2)])) == ["1", "2"]
    half = SHARED_NUMEL // 2
    rows = [row(f"h.0.{n}", n, numel=half) for n in range(1, 4)]
    assert told(share(rows)) == ["", "3", "3"]
    assert told(share([row("h.0.a", 1, numel=half), row("h.0.b", 2, numel=half + 1)])) == [
        "1",
        "2",
    ]
    assert share([]) == []


def test_changes_are_compared_where_the_digest_of_all_is_known() -> None:
    rows = share([row(name, number) for number, name in enumerate(NAMES, 1)])
    found = RowDigests(rows)
    assert found.add("h.0.c", digest(3)) is None
    assert found.add("h.1.b", digest(5)) is None
    assert found.add("h.0.a", digest(1)) is None
    assert found.add("h.0.b", digest(2)) == (digest(1) + digest(2) + digest(3),) * 2
    other = present(found.add("h.1.a", digest(7)))
    assert other.actual - other.expected == digest(7) - digest(4)
    assert found.named("h.1.a") == "'h.1.a' to 'h.1.b'"
    assert RowDigests([row("w", 1)]).named("w") == "'w'"


def test_changes_of_several_parts_join_what_one_of_them_joins() -> None:
    first = [row("a", 1), row("b", 2), row("c", 0), row("d", 3), row("e", 4)]
    second = [row("b", 0), row("c", 5)]
    assert list(changes_of([first, second])) == [
        (frozenset("a"), digest(1)),
        (frozenset("bcd"), digest(2) + digest(3) + digest(5)),
        (frozenset("e"), digest(4)),
    ]


def weights() -> tuple[dict[str, Bits], dict[str, Bits]]:
    rng = np.random.default_rng(3)
    old: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    for spec in SPECS:
        values = (rng.standard_normal(spec.numel) * 0.02).astype(np.float32)
        old[spec.name] = (values.view(np.uint32) >> 16).astype(np.uint16)
        new[spec.name] = old[spec.name] + (rng.random(spec.numel) < 0.02).astype(np.uint16)
    return old, new


def data_of(old: dict[str, Bits], new: dict[str, Bits]) -> bytes:
    rows = []
    for spec in SPECS:
        delta = changes(spec, old[spec.name], new[spec.name])
        at = present(delta.indices)
        change = digest_change(spec, at, old[spec.name][at], new[spec.name][at])
        encoding, before = ENCODINGS.get("max"), partial(OldBits, old[spec.name])
        rows.append(Change(delta, change, encoding=encoding, old=before))
    return encode_part(rows).data


def test_a_part_states_the_sums_and_strangers_read_it() -> None:
    old, new = weights()
    data = data_of(old, new)
    part = Part.from_bytes(data)
    assert [bool(one.digest) for one in part.directory.tensors] == [False, False, True, False, True]
    digests = RowDigests(part.directory.tensors)
    for spec in SPECS:
        delta = part.read(spec.name, old=OldBits(old[spec.name]))
        assert delta.indices is not None
        after = delta.new_bits(old[spec.name][delta.indices])
        assert (after == new[spec.name][delta.indices]).all()
        change = digest_change(spec, delta.indices, old[spec.name][delta.indices], after)
        found = digests.add(spec.name, change)
        assert found is None or found.actual == found.expected
    theirs = stranger.read_part(data, {name: bits.tolist() for name, bits in old.items()})
    assert list(theirs) == list(NAMES)


def test_a_digest_left_to_no_row_is_malformed() -> None:
    old, new = weights()
    pieces = take_apart(data_of(old, new))
    pieces.rows[-1]["digest"] = ""
    data = pieces.build()
    with pytest.raises(MalformedError, match=r"no row has the digest of tensor 'h\.1\.b'"):
        Part.from_bytes(data)
    with pytest.raises(RefusedError, match="digest"):
        stranger.read_part(data, {name: bits.tolist() for name, bits in old.items()})


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row("a", 0), row("b", 1, encoding="step")], "no row has the digest of tensor 'a'"),
        ([row("a", 0, encoding="step"), row("b", 1)], "no digest of tensor 'a'"),
        ([row("a", 1), row("b", 0)], "no row has the digest of tensor 'b'"),
        ([row("a", 1), row("", 0)], "no row has the digest of tensor ''"),
        ([msgspec.structs.replace(row("a", 1), digest="0" * 31)], "is not a state digest"),
    ],
)
def test_digests_that_are_none_are_refused(rows: list[TensorRow], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_digests(rows)


def told_wrongly(old: dict[str, Bits], new: dict[str, Bits]) -> bytes:
    """A part whose first digest is that of other changes."""
    pieces = take_apart(data_of(old, new))
    total = StateDigest.parse(pieces.rows[2]["digest"])
    pieces.rows[2]["digest"] = str(total + StateDigest(1, 0))
    return pieces.build()


def proven(data: bytes, old: dict[str, Bits], new: dict[str, Bits]) -> dict[str, Bits]:
    """The weights after the proof of an edge of one part."""
    digests = {s.name: kernel_host.digest(digest_key(s), old[s.name]) for s in SPECS}
    specs = {spec.name: spec for spec in SPECS}
    found = Weights(specs, {n: bits.copy() for n, bits in old.items()}, digests)
    edge = SimpleNamespace(record=None, version=1, base=0, kind="delta")
    fetched: Any = SimpleNamespace(
        plan=SimpleNamespace(edges=[edge]), base=None, names=NAMES, parts=[Part.from_bytes(data)]
    )
    state = sum((kernel_host.digest(digest_key(s), new[s.name]) for s in SPECS), StateDigest())
    found.prove(fetched, state, write=True)
    return found.bits


def test_verification_compares_the_sums() -> None:
    old, new = weights()
    bits = proven(data_of(old, new), old, new)
    assert all((bits[name] == new[name]).all() for name in NAMES)
    with pytest.raises(DigestMismatchError, match=r"'h\.0\.a' to 'h\.0\.c'"):
        proven(told_wrongly(old, new), old, new)


@dataclass
class Plan:
    """A plan whose parts have the given rows."""

    rows: list[list[TensorRow]]
    base: Any = None
    specs: dict[str, TensorSpec] = field(
        default_factory=lambda: {name: TensorSpec(name, "BF16", (10,)) for name in "abcd"}
    )

    @property
    def parts(self) -> list[Any]:
        return [SimpleNamespace(rows={one.name: one for one in rows}) for rows in self.rows]


def after(state: UnusedState, *rows: TensorRow) -> UnusedState:
    plan: Any = Plan([list(rows)])
    return state.after(plan)


def whole(name: str, number: int) -> TensorRow:
    return msgspec.structs.replace(row(name, number, encoding="dense"), nnz=10)


def test_unused_tensors_that_share_a_digest_are_known_in_their_sum() -> None:
    state = UnusedState({"a": digest(1), "b": digest(2)})
    one = after(state, row("a", 0), row("b", 30))
    assert one.total == digest(1) + digest(2) + digest(30)
    effect = present(state.effect(one))
    assert effect.change == digest(30)
    two = after(one, row("a", 100))
    assert two.total == digest(1) + digest(2) + digest(30) + digest(100)


def test_one_of_them_given_whole_says_nothing_of_the_others() -> None:
    state = UnusedState({"a": digest(1), "b": digest(2), "c": digest(3)})
    joint = after(state, row("a", 0), row("b", 30))
    one = after(joint, whole("a", 500))
    assert (one.digests, one.total) == ({"a": digest(500), "b": None, "c": digest(3)}, None)
    both = after(joint, whole("a", 500), whole("b", 600))
    assert both.total == digest(500) + digest(600) + digest(3)
    assert after(both, row("a", 7)).total == digest(500) + digest(600) + digest(3) + digest(7)


def test_a_digest_shared_with_a_tensor_in_use_says_nothing() -> None:
    state = UnusedState({"a": digest(1), "b": digest(2)})
    found = after(state, row("a", 0), row("c", 30))
    assert (found.digests, found.shared_with_used) == ({"a": None, "b": digest(2)}, "a")
    other = after(state, row("d", 0), row("c", 30))
    assert (other.total, other.shared_with_used) == (state.total, "")
    assert after(found, whole("a", 5)) == UnusedState({"a": digest(5), "b": digest(2)})
    unknown = UnusedState({"a": None, "b": digest(2)})
    assert after(unknown, row("a", 0), row("b", 30)).digests == {"a": None, "b": None}


def test_a_checkpoint_gives_each_anew() -> None:
    state = UnusedState({"a": digest(1), "b": None}, frozenset("ab"))
    bits: Bits = np.arange(10, dtype=np.uint16)
    plan: Any = Plan([], base=SimpleNamespace(bits=lambda _: bits))
    found = state.after(plan)
    assert not found.joint
    for name in "ab":
        assert found.digests[name] == kernel_host.digest(digest_key(plan.specs[name]), bits)

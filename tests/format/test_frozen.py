"""What was frozen is read forever, by a stranger as well, and written today as it was then."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.chain.plan import Plan, make_plan
from deltachain.chain.trust import Trust, TrustedKeys
from deltachain.checkpoint import Checkpoint
from deltachain.codec import Part
from deltachain.format.documents import Tag, seal, unseal
from deltachain.format.keys import tag_key
from deltachain.types import WIRE_DTYPES, Bits
from deltachain.verify import verify
from tests.format import freeze, stranger, stranger_chain
from tests.format.forge import take_apart
from tests.format.stranger import RefusedError
from tests.support.fetch import fetch

EXPECTED: dict[str, Any] = json.loads((freeze.FOLDER / "expected.json").read_bytes())
TILES: dict[str, Any] = json.loads((freeze.FOLDER / "max" / "expected.json").read_bytes())
FROZEN = {folder: freeze.frozen(folder) for folder in freeze.FROZEN}
FILES, SIGNED, TAGS = (FROZEN[at] for at in (freeze.FOLDER, freeze.SIGNED, freeze.TAGS))
CHAIN = freeze.frozen(freeze.FOLDER / "chain")
FROZEN_WITH = (1, 5, 7)
"""Version of libzstd; another one may compress the same content to other bytes."""

Get = Callable[[str], bytes | None]


@cache
def _today(folder: Path) -> dict[str, bytes]:
    """Write a frozen chain anew, not while tests are collected: kernels are compiled for it."""
    return freeze.FROZEN[folder]()


@pytest.fixture
def chain() -> Chain:
    return Chain.open(freeze.store_of(CHAIN))


@pytest.mark.parametrize("name", EXPECTED["parts"])
def test_frozen_parts_say_what_they_said(name: str) -> None:
    part = Part.from_bytes(FILES[name], key=name)
    part.verify()
    assert freeze.contents(part) == EXPECTED["parts"][name]
    assert {
        tensor: {
            **{field: delta.row[field] for field in ("encoding", "dtype", "shape")},
            "indices": None if delta.row["encoding"] in ("dense", "plain") else list(delta.indices),
            "values": delta.bytes().hex(),
        }
        for tensor, delta in stranger.read_part(FILES[name]).items()
    } == EXPECTED["parts"][name]


@pytest.mark.parametrize("name", TILES)
def test_frozen_tiles_say_what_they_said(name: str) -> None:
    data, rows = FILES[f"max/{name}.safetensors"], TILES[name]
    part = Part.from_bytes(data)
    part.verify()
    old: dict[str, Bits] = {
        tensor: np.frombuffer(bytes.fromhex(row["old"]), part.rows[tensor].spec.bits_dtype)
        for tensor, row in rows.items()
    }
    found = {
        tensor: row | {"old": rows[tensor]["old"]}
        for tensor, row in freeze.contents(part, old).items()
    }
    assert found == rows
    theirs = stranger.read_part(data, {tensor: bits.tolist() for tensor, bits in old.items()})
    for tensor, row in rows.items():
        assert list(theirs[tensor].indices) == row["indices"]
        assert theirs[tensor].bytes().hex() == row["values"]


@pytest.mark.parametrize("name", ["raw", "plain"])
def test_uncompressed_parts_open_as_checkpoints_do(name: str) -> None:
    path = freeze.FOLDER / "parts" / f"{name}.safetensors"
    suffix = ".values" if name == "raw" else ""
    tensors = EXPECTED["parts"][f"parts/{name}.safetensors"]
    found = Checkpoint(path)
    for tensor, row in tensors.items():
        assert found.bits(tensor + suffix).tobytes().hex() == row["values"]
        assert found.specs[tensor + suffix].dtype == row["dtype"]


def test_frozen_chain_has_its_head_and_its_history(chain: Chain) -> None:
    head = chain.head()
    assert head is not None
    assert (head.version, head.manifest.epoch, head.manifest.nnz) == (3, 1, 0)
    assert [c.version for c in chain.history(0, 3)] == [0, 1, 2, 3]
    states = [str(chain.read(version).state) for version in range(4)]
    assert states == [version["state"] for version in EXPECTED["versions"]]
    assert dict(chain.assets()) == {"config.json": b'{"model_type":"tiny"}'}


def weights_at(chain: Chain, plan: Plan) -> dict[str, str]:
    fetched = fetch(chain, plan)
    assert str(fetched.state()) == EXPECTED["versions"][plan.target]["state"]
    return {name: fetched.read(name).values.tobytes().hex() for name in fetched.names}


@pytest.mark.parametrize("version", range(4))
def test_frozen_versions_are_rebuilt(chain: Chain, version: int) -> None:
    plan = chain.plan(None, chain.read(version))
    assert weights_at(chain, plan) == EXPECTED["versions"][version]["weights"]


@pytest.mark.parametrize("kinds", [["anchor", "delta", "delta"], ["anchor", "skip"], ["anchor"]])
def test_every_way_to_a_frozen_version_leads_to_the_same_weights(
    chain: Chain, kinds: list[str]
) -> None:
    recent = chain.read(3).manifest.recent
    start = 2 if kinds == ["anchor"] else 0
    edges = [e for e in recent if e.kind in kinds[1:] or (e.kind, e.version) == ("anchor", start)]
    plan = make_plan(None, 2, edges, encodings={"step", "overwrite", "dense"})
    assert [edge.kind for edge in plan.edges] == kinds
    assert weights_at(chain, plan) == EXPECTED["versions"][2]["weights"]


def as_hex(chain: stranger_chain.Chain, weights: stranger_chain.Weights) -> dict[str, str]:
    widths = {name: WIRE_DTYPES[dtype] for name, (dtype, _) in chain.specs.items()}
    return {
        name: b"".join(bit.to_bytes(widths[name], "little") for bit in bits).hex()
        for name, bits in weights.items()
    }


def test_a_stranger_rebuilds_the_frozen_chain_by_every_way() -> None:
    chain = stranger_chain.Chain(CHAIN.get)
    assert chain.head() == 3
    ways = []
    for version in range(4):
        for route in chain.routes(version):
            found = as_hex(chain, chain.follow(route))
            assert found == EXPECTED["versions"][version]["weights"]
            ways.append([edge["kind"] for _, edge in route])
    assert ways == [
        ["anchor"],
        ["anchor", "delta"],
        ["anchor", "delta", "delta"],
        ["anchor"],
        ["anchor", "skip"],
        ["anchor", "delta", "delta", "delta"],
        ["anchor", "delta"],
        ["anchor", "skip", "delta"],
    ]


STRANGE = Ed25519PrivateKey.from_private_bytes(b"\7" * 32).public_key().public_bytes_raw()
OWN = freeze.KEY.public.raw


@pytest.mark.parametrize("trust", [Trust(), Trust(trusted=TrustedKeys((freeze.KEY.public,)))])
def test_the_signed_chain_is_read_with_and_without_trusted_keys(trust: Trust) -> None:
    key_id = freeze.KEY.public.key_id
    proofs = list(verify(Chain.open(freeze.store_of(SIGNED), trust)))
    assert [proof.signatures for proof in proofs] == [(), (key_id,), (key_id,)]
    by = (key_id,) if trust.trusted else ()
    assert [proof.signed_by for proof in proofs] == [(), by, by]
    kinds = [edge.kind for proof in proofs for edge in proof.edges]
    assert kinds == ["anchor", "delta", "anchor", "delta"]


def follow_all(chain: stranger_chain.Chain) -> list[stranger_chain.Weights]:
    return [chain.follow(way) for v in range(chain.head() + 1) for way in chain.routes(v)]


@pytest.mark.parametrize("trusted", [[OWN], [STRANGE, OWN]])
def test_a_stranger_proves_the_signed_chain_by_every_way(trusted: list[bytes]) -> None:
    found = follow_all(stranger_chain.SignedChain(SIGNED.get, trusted))
    numbers = [0, 1, 1, 1, 1]
    assert found == [{"w": freeze.signed_version(number).tolist()} for number in numbers]


def test_a_stranger_reads_a_signed_chain_without_keys() -> None:
    assert stranger_chain.Chain(SIGNED.get).head() == 2


@pytest.mark.parametrize("trusted", [[], [STRANGE]])
def test_a_stranger_refuses_a_chain_by_no_trusted_key(trusted: list[bytes]) -> None:
    with pytest.raises(RefusedError, match="not signed"):
        follow_all(stranger_chain.SignedChain(SIGNED.get, trusted))


def read_unsigned(get: Get) -> None:
    follow_all(stranger_chain.Chain(get))


def read_signed(get: Get) -> None:
    follow_all(stranger_chain.SignedChain(get, [OWN]))


def read_tag(get: Get) -> None:
    stranger_chain.tagged(get, "best")


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def spoilt(files: dict[str, bytes], reads: Callable[[Get], None]) -> Iterable[Any]:
    """Each file with one byte changed, but those that a stranger does not read."""
    for key, data in files.items():
        if not key.startswith(("assets/", "head.json")):
            name = f"{reads.__name__} {key}"
            yield pytest.param(files | {key: changed(data, -20)}, reads, id=name)


BEST = tag_key("best", 1)


def tag_with(**fields: object) -> bytes:
    record = unseal(TAGS[BEST], Tag, key=BEST)
    kept: dict[str, Any] = {name: getattr(record, name) for name in record.__struct_fields__}
    return seal(Tag(**kept | fields))


NO_TAGS = [changed(TAGS[BEST], at) for at in (20, 120, 300, -20)] + [
    tag_with(name="worst"),
    tag_with(number=0),
    tag_with(chain="x"),
    tag_with(manifest="0" * 64),
]


@pytest.mark.parametrize(
    ("files", "reads"),
    [
        *spoilt(CHAIN, read_unsigned),
        *spoilt(SIGNED, read_signed),
        *((CHAIN | TAGS | {BEST: data}, read_tag) for data in NO_TAGS),
    ],
)
def test_a_stranger_refuses_what_was_changed(
    files: Mapping[str, bytes], reads: Callable[[Get], None]
) -> None:
    with pytest.raises(RefusedError):
        reads(files.get)


@pytest.mark.parametrize("key", [key for key in CHAIN if key.startswith(("head.json", "assets/"))])
def test_a_stranger_does_not_read_hints_and_small_files(key: str) -> None:
    read_unsigned((CHAIN | {key: b""}).get)


def test_the_frozen_tags_are_read() -> None:
    chain = Chain.open(freeze.store_of(CHAIN | TAGS))
    best = tags.read(chain, "best")
    assert best is not None
    assert (best.version, best.number, best.state) == (3, 1, chain.read(3).manifest.state)
    assert tags.committed(chain, best).version == 3
    assert tags.read(chain, "eval-step-10") is None
    assert tags.read_all(chain) == (best,)
    get = (CHAIN | TAGS).get
    names = ("best", "eval-step-10", "other")
    assert [stranger_chain.tagged(get, name) for name in names] == [3, None, None]


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".safetensors")])
def test_the_writer_still_makes_the_same_parts(name: str) -> None:
    today, frozen = take_apart(_today(freeze.FOLDER)[name]), take_apart(FILES[name])
    for pieces in (today, frozen):
        if pieces.zstd:
            del pieces.metadata["directory_nbytes"]  # holds the lengths of compressed frames
    assert today == frozen


@pytest.mark.parametrize("folder", FROZEN, ids=lambda folder: folder.name)
def test_the_writer_still_makes_the_same_bytes(folder: Path) -> None:
    today, frozen = _today(folder), FROZEN[folder]
    assert today.keys() == frozen.keys()
    plain = ("parts/plain", "parts/raw", "chain/table", "expected")
    for name, data in frozen.items():
        may_differ = folder == freeze.FOLDER and not name.startswith(plain)
        if not (may_differ and zstandard.ZSTD_VERSION != FROZEN_WITH):
            assert today[name] == data, name


def test_what_is_frozen_is_not_written_again(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        freeze.write(freeze.FOLDER, _today(freeze.FOLDER))
    assert freeze.frozen(freeze.FOLDER) == FILES
    freeze.write(tmp_path / "v2", FILES)
    assert freeze.frozen(tmp_path / "v2") == FILES

"""Every number in FORMAT.md and its test vectors, computed again."""

import json
import re
from collections.abc import Mapping
from typing import Final, cast

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric import ed25519
from msgspec import to_builtins

from deltachain.chain.plan import ANCHORS_LISTED, REQUEST_NBYTES, VERSIONS_LISTED
from deltachain.codec import ENCODINGS
from deltachain.codec import container as d
from deltachain.codec.container import MAX_DIRECTORY, MAX_HEADER, SEGMENT
from deltachain.codec.encode import BUCKET, TURNS
from deltachain.codec.encodings.sparse import WIDE_GAPS_BELOW
from deltachain.codec.frames import FRAME, LEVEL
from deltachain.codec.rows import with_full_rows, with_short_rows
from deltachain.delta import ABSOLUTE, STEP, TensorDelta, fold
from deltachain.format import documents
from deltachain.format.keys import digest_key, manifest_key
from deltachain.kernels import host
from deltachain.types import BITS_DTYPES, MAX_DIMS, MAX_NUMEL, WIRE_DTYPES, Bits, TensorSpec
from tests.contract import reference
from tests.format import freeze, stranger, stranger_chain
from tests.format.stranger import mix, state_text, tensor_key, tensor_lanes

TEXT: Final = (freeze.FOLDER.parents[2] / "deltachain" / "FORMAT.md").read_text(encoding="utf-8")
TINY: Final = (freeze.FOLDER / "parts" / "tiny.safetensors").read_bytes()


def section(title: str) -> str:
    found = re.search(
        rf"^### {re.escape(title)}\n(.*?)(?=^### |\Z)", TEXT, re.MULTILINE | re.DOTALL
    )
    assert found is not None, title
    return found[1]


def table(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def block(kind: str) -> str:
    found = re.search(rf"^```{kind}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, kind
    return found[1]


def number(text: str) -> int:
    return int(text, 16 if text.startswith("0x") else 10)


def raw(text: str) -> bytes:
    return b"" if text == "none" else bytes.fromhex(text)


def spec_of(row: Mapping[str, str]) -> TensorSpec:
    return TensorSpec(json.loads(row["name"]), row["dtype"], tuple(json.loads(row["shape"])))


VECTORS: Final[dict[str, list[dict[str, str]]]] = json.loads(
    (freeze.FOLDER.parent / "vectors.json").read_text(encoding="utf-8")
)
MIX = VECTORS["mix"]
KEYS = VECTORS["keys"]
STATES = VECTORS["states"]
GAPS = VECTORS["gaps"]
STEPS = VECTORS["steps"]
BITS = VECTORS["bits"]
CASTS = VECTORS["casts"]
FOLDS = VECTORS["folds"]
NAMES = VECTORS["names"]
SIZES = VECTORS["sizes"]


def test_every_table_has_rows() -> None:
    tables = (MIX, KEYS, STATES, GAPS, STEPS, BITS, CASTS, FOLDS, NAMES, SIZES)
    assert [len(t) for t in tables] == [6, 4, 6, 9, 20, 5, 12, 8, 6, 7]


@pytest.mark.parametrize("row", MIX)
def test_mix(row: dict[str, str]) -> None:
    key, i, b = (number(row[name]) for name in ("key", "i", "b"))
    ours = reference.mix(key, np.array([i], np.int64), np.array([b], np.uint64))
    assert [int(ours[0]), mix(key, i, b)] == [number(row["mix"])] * 2


@pytest.mark.parametrize("row", KEYS)
def test_keys_of_tensors(row: dict[str, str]) -> None:
    spec = spec_of(row)
    keys = (number(row["key[0]"]), number(row["key[1]"]))
    assert digest_key(spec) == tensor_key(spec.name, spec.dtype, spec.shape) == keys


@pytest.mark.parametrize("row", STATES)
def test_state_digests_of_tensors(row: dict[str, str]) -> None:
    spec = spec_of(row)
    bits: Bits = np.frombuffer(raw(row["bytes"]), spec.bits_dtype)
    assert bits.size == spec.numel
    key = digest_key(spec)
    theirs = tensor_lanes(spec.name, spec.dtype, spec.shape, bits.tolist())
    found = [str(reference.digest(key, bits)), str(host.digest(key, bits)), state_text(theirs)]
    assert found == [row["digest"]] * 3


@pytest.mark.parametrize("row", GAPS)
def test_gaps(row: dict[str, str]) -> None:
    width = int(row["gap"])
    offsets = np.array(row["offsets"].split(), np.int64)
    planes = [raw(text) for text in row["bytes"].split()]
    for kernels in (reference, host):
        gaps = kernels.encode_gaps(offsets, width)
        elements = gaps.view(np.uint8).reshape(-1, width)
        assert [elements[:, k].tobytes() for k in range(width)] == planes
        assert np.array_equal(kernels.decode_gaps(gaps), offsets)


@pytest.mark.parametrize("row", STEPS)
def test_steps(row: dict[str, str]) -> None:
    dtype = BITS_DTYPES[int(row["width"]) // 8]
    old, new = (np.array([number(row[name])], dtype) for name in ("old", "new"))
    step: Bits = new - old
    assert int(step[0]) == number(row["step"])
    for kernels in (reference, host):
        split = kernels.split_steps(step)
        assert [int(split.negative[0]), int(split.exception[0])] == [
            int(row["sign"]),
            int(row["exception"]),
        ]
        assert split.magnitude.tobytes() == raw(row["magnitude"])
        assert split.wide.tobytes() == raw(row["wide"])
        assert np.array_equal(old + reference.join_steps(split), new)


@pytest.mark.parametrize("row", BITS)
def test_streams_of_bits(row: dict[str, str]) -> None:
    bits = np.array(list(row["bits"]), np.uint8)
    assert np.packbits(bits, bitorder="little").tobytes() == raw(row["bytes"])
    cursor = stranger.Cursor({"s": raw(row["bytes"])})
    assert cursor.take_bits("s", bits.size) == bits.tolist()


@pytest.mark.parametrize("row", CASTS)
def test_casts(row: dict[str, str]) -> None:
    master = np.array([number(row["fp32"])], np.uint32).view(np.float32)
    for kernels in (reference, host):
        assert int(kernels.cast_bf16(master)[0]) == number(row["BF16"])


ELEMENT: Final = TensorSpec("w", "U16", (3,))


def delta_of(text: str) -> TensorDelta:
    kind, _, value = text.partition(" ")
    values = np.array([number(value)] if value else [], np.uint16)
    return TensorDelta(
        spec=ELEMENT,
        indices=np.ones(values.size, np.int64),
        values=values,
        absolute=ABSOLUTE if kind == "absolute" else STEP,
    )


@pytest.mark.parametrize("row", FOLDS)
def test_folding(row: dict[str, str]) -> None:
    found, expected = fold(delta_of(row["older"]), delta_of(row["newer"])), delta_of(row["folded"])
    assert found.nnz == expected.nnz
    assert found.values.tolist() == expected.values.tolist()
    assert found.absolute.all() == expected.absolute.all() or not found.nnz


def dumped() -> bytes:
    whole = b""
    for line in block("hexdump").splitlines():
        if not line.startswith("#"):
            offset, digits = line.split()
            assert int(offset, 16) == len(whole)
            whole += bytes.fromhex(digits)
    return whole


def test_the_dump_is_the_frozen_file() -> None:
    assert dumped() == TINY
    assert f"`{blake3(TINY).hexdigest()}`" in section("8.1 A whole part")


def test_the_header_and_the_directory_are_those_of_the_dump() -> None:
    end = 8 + int.from_bytes(TINY[:8], "little")
    assert TINY[8:end].decode().rstrip(" ") == block("json header").strip()
    first, last = json.loads(TINY[8:end])["directory"]["data_offsets"]
    frame = TINY[end + first : end + last]
    assert zstandard.decompress(frame).decode() == block("json directory").strip()


def test_the_notes_in_the_dump_are_true() -> None:
    lines = block("hexdump").splitlines()
    streams = {}
    for at, line in enumerate(lines):
        if (found := re.match(r"# (#0\S+), inflated ([0-9a-f]+)", line)) is not None:
            frame = bytes.fromhex(lines[at + 1].split()[1])
            assert zstandard.decompress(frame).hex() == found[2]
            streams[found[1]] = found[2]
    names = ["exception", "gap8", "magnitude", "sign", "wide.0", "wide.1"]
    assert list(streams) == [f"#0.{name}" for name in names]


SIGNED = section("8.2 Signatures")
SIGNATURES = table(SIGNED)
PUBLIC = freeze.KEY.public


def test_the_keys_of_the_signatures() -> None:
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    assert key.public_key().public_bytes_raw() == PUBLIC.raw
    assert stranger_chain.key_id(PUBLIC.raw) == PUBLIC.key_id
    assert f"`{PUBLIC}`" in SIGNED
    assert f"`{PUBLIC.key_id}`" in SIGNED
    assert len(SIGNATURES) == 5


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: f"{row['type']} {row['chain'][-1]}")
def test_signatures(row: dict[str, str]) -> None:
    (kind,) = (kind for kind, name in documents.RECORD_TYPES.items() if name == row["type"])
    payload = b'{"format":1}'
    signature = freeze.KEY.sign(kind, row["chain"], payload)
    assert signature.value == row["value"]
    signed = stranger_chain.signed_bytes(row["type"], row["chain"], payload)
    assert signed == documents.signed_bytes(kind, row["chain"], payload)
    assert stranger_chain.verifies(PUBLIC.raw, to_builtins(signature), signed)
    assert not stranger_chain.verifies(PUBLIC.raw, to_builtins(signature), signed + b" ")


@pytest.mark.parametrize("row", NAMES)
def test_names_are_front_coded(row: dict[str, str]) -> None:
    before = [] if row["row before"] == "none" else [("step", row["row before"], 3, 4)]
    full = directory_of(*before, ("max", row["name"], 3, 4))
    stored = with_short_rows(full)
    assert stored.tensors[-1].name == row["stored"]
    assert with_full_rows(stored) == full
    theirs = to_builtins(stored.tensors[-1])
    name = before[0][1] if before else ""
    assert stranger.lengthen(theirs, name, [])["name"] == row["name"]


@pytest.mark.parametrize("row", SIZES)
def test_sizes_are_distances(row: dict[str, str]) -> None:
    nnz, nbytes, distance = (int(row[name]) for name in ("nnz", "bytes", "stored"))
    full = directory_of(("max", "w", nnz, nbytes))
    stored = with_short_rows(full)
    assert stored.segments.gaps == (distance,)
    assert with_full_rows(stored) == full
    segment = {"nnz": nnz, "gaps": distance}
    stranger.lengthen(to_builtins(stored.tensors[0]), "", [segment])
    assert segment["gaps"] == nbytes


def directory_of(*rows: tuple[str, str, int, int]) -> d.Directory:
    tensors = tuple(
        d.TensorRow(
            name=name,
            dtype="U8",
            shape=(d.SEGMENT,),
            encoding=encoding,
            bucket=0,
            gap=0,
            nnz=nnz,
            segments=1,
            digest="0" * 32,
        )
        for encoding, name, nnz, _ in rows
    )
    segments = [d.Segment(0, d.SEGMENT, nnz, nbytes) for *_, nnz, nbytes in rows]
    return d.Directory(tensors=tensors, segments=d.columns_of(segments), streams=())


def test_the_signed_documents_on_the_page_are_the_frozen_ones() -> None:
    (signature,) = freeze.SIGNED.glob("signatures/*/*.json")
    frozen = {
        "identity": freeze.SIGNED / "chain.json",
        "signature": signature,
        "envelope": freeze.SIGNED / manifest_key(1),
    }
    for name, file in frozen.items():
        assert block(f"json {name}") == file.read_text(encoding="utf-8") + "\n"


def test_the_prune_record_on_the_page_is_the_frozen_one() -> None:
    ((key, data),) = freeze.frozen(freeze.PRUNES).items()
    assert block("json prune") == data.decode() + "\n"
    assert documents.unseal(data, documents.PruneRecord, key=key) == freeze.PRUNE_RECORD
    found = stranger_chain.read_prune(block("json prune").rstrip().encode())
    for row in VECTORS["pruned"]:
        kind, version = row["kind"], int(row["version"])
        base = None if row["base"] == "none" else int(row["base"])
        edge = documents.EdgeSummary(
            version=version,
            kind=cast(documents.EdgeKind, kind),
            base=base,
            nbytes=0,
            parts=0,
            encodings=(),
            state="",
        )
        expected = row["pruned"] == "yes"
        assert freeze.PRUNE_RECORD.covers(edge) == expected
        assert stranger_chain.is_pruned(found, kind, base, version) == expected


def test_the_limits_are_those_of_the_code() -> None:
    found = {row["limit"]: row["value"] for row in table(TEXT.split("\n\n| wire dtype")[0])}
    assert found["dimensions of a tensor"] == str(MAX_DIMS)
    assert found["elements of a tensor"] == f"2^{MAX_NUMEL.bit_length() - 1}"
    assert found["header of a part"] == f"{MAX_HEADER:,} bytes"
    assert found["directory of a part, inflated"] == f"2^{MAX_DIRECTORY.bit_length() - 1} bytes"
    assert found["frame, inflated"] == f"2^{FRAME.bit_length() - 1} bytes"
    assert found["segment"] == f"2^{SEGMENT.bit_length() - 1} elements"
    powers = (MAX_NUMEL, MAX_DIRECTORY, FRAME, SEGMENT)
    assert all(n & (n - 1) == 0 for n in powers)


def test_the_dtypes_are_those_of_the_code() -> None:
    after = "| wire dtype" + TEXT.split("\n| wire dtype")[1].split("\n\n")[0]
    found = {
        dtype: int(row["bytes an element"])
        for row in table(after)
        for dtype in row["wire dtype"].split(", ")
    }
    assert found == WIRE_DTYPES


def test_the_encodings_are_those_of_the_code() -> None:
    after = "| encoding | gives" + TEXT.split("\n| encoding | gives")[1].split("\n\n")[0]
    assert {row["encoding"].strip("`") for row in table(after)} == set(ENCODINGS)


def test_the_choices_of_our_writer_are_those_of_the_code() -> None:
    text = " ".join(TEXT.split())
    listed = ["zero", "one", "two", "three"][ANCHORS_LISTED]
    for choice in (
        f"Ours lists {VERSIONS_LISTED} versions: "
        f"`window_from` is `max(0, version - {VERSIONS_LISTED})`",
        f"the newest {listed} edges that start from nothing",
        f"segments of 2^{SEGMENT.bit_length() - 1} elements",
        f"2^{BUCKET.bit_length() - 1} elements are passed",
        f"changes more than {TURNS} times",
        f"below a density of {100 * WIDE_GAPS_BELOW:.1f} %",
        f"compresses at level {LEVEL}",
        f"(parts + 1) * 2^{REQUEST_NBYTES.bit_length() - 1}",
    ):
        assert choice in text

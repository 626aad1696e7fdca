"""What was frozen as version 1 is read forever, and written today as it was then."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from deltachain.chain.chain import Chain
from deltachain.chain.fetch import fetch
from deltachain.chain.plan import Plan, make_plan
from deltachain.checkpoint import Checkpoint
from deltachain.codec import Part
from deltachain.store.memory import MemoryStore
from deltachain.types import Bits
from tests.format import freeze, stranger
from tests.format.forge import take_apart

EXPECTED: dict[str, Any] = json.loads((freeze.FOLDER / "expected.json").read_bytes())
TILES: dict[str, Any] = json.loads((freeze.FOLDER / "max" / "expected.json").read_bytes())
FILES = freeze.frozen(freeze.FOLDER)
FROZEN_WITH = (1, 5, 7)
"""Version of libzstd; another one may compress the same content to other bytes."""


@pytest.fixture
def chain() -> Chain:
    store = MemoryStore()
    for name, data in FILES.items():
        if name.startswith("chain/"):
            store.put(name.removeprefix("chain/"), data)
    return Chain.open(store)


@pytest.mark.parametrize("name", EXPECTED["parts"])
def test_frozen_parts_say_what_they_said(name: str) -> None:
    part = Part.from_bytes(FILES[name], key=name)
    part.verify()
    assert freeze.contents(part) == EXPECTED["parts"][name]


def test_every_encoding_is_frozen() -> None:
    rows = [row for tensors in EXPECTED["parts"].values() for row in tensors.values()]
    assert {row["encoding"] for row in rows} == {"step", "overwrite", "dense", "raw", "plain"}
    assert {row["dtype"] for row in rows} == {"BF16", "F32", "F8_E4M3", "I64", "F16"}


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
        values = np.array(theirs[tensor].values, old[tensor].dtype)
        assert values.tobytes().hex() == row["values"]


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


TODAY = freeze.build()


def test_the_writer_still_makes_the_same_files() -> None:
    assert TODAY.keys() == FILES.keys()


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".safetensors")])
def test_the_writer_still_makes_the_same_parts(name: str) -> None:
    today, frozen = take_apart(TODAY[name]), take_apart(FILES[name])
    for pieces in (today, frozen):
        if pieces.zstd:
            del pieces.metadata["directory_nbytes"]  # holds the lengths of compressed frames
    assert today == frozen


@pytest.mark.parametrize("name", FILES)
def test_the_writer_still_makes_the_same_bytes(name: str) -> None:
    compressed = not name.startswith(("parts/plain", "parts/raw", "chain/table", "expected"))
    assert TODAY[name] == FILES[name] or (compressed and zstandard.ZSTD_VERSION != FROZEN_WITH)


def test_what_is_frozen_is_not_written_again(tmp_path: Path) -> None:
    before = dict(FILES)
    with pytest.raises(FileExistsError):
        freeze.write(freeze.FOLDER, TODAY)
    assert {n: (freeze.FOLDER / n).read_bytes() for n in before} == before
    freeze.write(tmp_path / "v2", TODAY)
    written = [file for file in (tmp_path / "v2").rglob("*") if file.is_file()]
    assert len(written) == len(FILES)


def test_fixtures_are_what_the_versions_are() -> None:
    for number, version in enumerate(EXPECTED["versions"]):
        bits = freeze.version(number)
        assert version["weights"] == {name: bits[name].tobytes().hex() for name in bits}
    assert not np.array_equal(freeze.version(1)["steps"], freeze.version(2)["steps"])

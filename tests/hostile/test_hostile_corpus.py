"""Nothing hostile gets past a follower: a typed error, soon, in little memory, nothing written."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from filelock import FileLock

from deltachain.chain.chain import Chain
from deltachain.checkpoint import read_assets
from deltachain.codec import Change, Part, encode_part
from deltachain.errors import (
    BaseMismatchError,
    BrokenChainError,
    SignatureError,
    TensorMismatchError,
)
from deltachain.format.documents import Edge, ObjectRef, Table
from deltachain.format.keys import object_digest, payload_key
from deltachain.store import MemoryStore
from deltachain.subscribe import FolderTarget, Subscriber
from deltachain.subscribe.targets.folder import write_assets
from deltachain.types import StateDigest, TensorSpec
from tests.format.forge import take_apart
from tests.format.forgeries import PARTS
from tests.format.freeze import Builder, as_max, step
from tests.hostile.corpus import CORPUS
from tests.hostile.follow_cases import CONTROL, KEEPS, KINDS, SIGNED_KINDS
from tests.hostile.scene import ORDERED, SCENES, Case, Category, Level, Scene

CODE = "modeling_policy.py"


def test_a_huge_tensor_that_is_not_given_whole_makes_no_folder_huge(tmp_path: Path) -> None:
    spec = TensorSpec("w", "U64", (1 << 48,))  # more bytes than there are addresses
    forgery = take_apart(PARTS["overwrite"])
    planes = {f"#0.value.{k}": b"\1\0\0" for k in range(8)}
    forgery.streams = {name: planes.get(name, data) for name, data in forgery.streams.items()}
    forgery.streams |= planes
    forgery.rows[0].update(dtype=spec.dtype, shape=list(spec.shape))
    data = forgery.build()
    builder = Builder([spec], {})
    key = payload_key("anchor", 0, 0, f"{0:032x}", 0)
    builder.store.put(key, data)
    digest, part = object_digest(data), Part.from_bytes(data)
    ref = ObjectRef(key=key, nbytes=len(data), blake3=digest, directory=part.digest)
    edge = Edge(kind="anchor", encodings=("overwrite",), parts=(ref,))
    builder.commit(0, edge, StateDigest(), nnz=part.nnz)
    follower = Subscriber(builder.store.url, tmp_path / "folder", store=builder.store)
    with pytest.raises(BrokenChainError, match="gives only 3 elements"):
        follower.update()
    assert not list(tmp_path.rglob("*.safetensors"))


def follow(scene: Scene) -> tuple[Subscriber, torch.Tensor]:
    """A follower at version 0, and its tensor."""
    tensor = torch.zeros(scene.spec.shape, dtype=torch.bfloat16)
    follower = Subscriber(scene.store.url, {scene.spec.name: tensor}, store=scene.store)
    follower.update(0)
    return follower, tensor


def refused(scene: Scene, match: str) -> BaseMismatchError:
    follower, tensor = follow(scene)
    before = tensor.clone()
    with pytest.raises(BaseMismatchError, match=match) as caught:
        follower.update()
    assert torch.equal(tensor, before)
    return caught.value


@pytest.mark.parametrize(
    ("scene", "stream"),
    [("step", "sign"), ("overwrite", "value.0"), ("max", "tile"), ("dense", "dense.0")],
)
def test_an_altered_tensor_is_refused_even_if_every_object_fits(scene: str, stream: str) -> None:
    forged = Scene(scene)
    pieces = take_apart(forged.read("part"))
    altered = bytearray(pieces.streams[f"#0.{stream}"])
    altered[0] ^= 1
    pieces.streams[f"#0.{stream}"] = bytes(altered)
    forged.put("part", pieces.build())
    refused(forged, match="would lead to state")


@pytest.mark.parametrize(("scene", "make"), [("step", step), ("max", as_max)])
def test_a_delta_that_leads_elsewhere_is_called_damaged(
    scene: str, make: Callable[..., Change]
) -> None:
    forged = Scene(scene)
    old = np.ones(forged.spec.numel, forged.spec.bits_dtype)
    new = old.copy()
    new[3] += new.dtype.type(5)
    forged.put("part", encode_part([make(forged.spec, old, new)]).data)
    error = refused(forged, match="would lead to state")
    assert "deltachain verify" in error.hint


def test_a_folder_forgets_the_model_that_it_was_not(tmp_path: Path) -> None:
    scene = Scene("step")
    target = FolderTarget(tmp_path)
    Subscriber(scene.store.url, target, store=scene.store).update(0)
    spec = scene.spec
    other = {spec.name: spec, "v": TensorSpec("v", "U8", (1,))}
    with pytest.raises(TensorMismatchError):
        target.bind(other, {})
    target.bind({}, {})
    assert target.state() is None
    target.bind({spec.name: spec}, {})
    ones = np.ones(spec.numel, spec.bits_dtype)
    assert target.state() == scene.state(ones)


def test_no_code_comes_out_of_a_chain(tmp_path: Path) -> None:
    files = {CODE: b"raise SystemExit", "config.json": b"{}"}
    chain = Chain.create(MemoryStore(), Table(tensors=()), chain_id="one", time=0.0, assets=files)
    assert dict(chain.assets()) == files
    assert write_assets(chain, tmp_path) == ["config.json"]
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_no_code_goes_into_a_chain(tmp_path: Path) -> None:
    for name in (CODE, "config.json", "weights.bin", "x.pkl"):
        (tmp_path / name).write_bytes(b"{}")
    assert list(read_assets(tmp_path)) == ["config.json"]


ROOT = Path(__file__).resolve().parents[2]
SECONDS = 5.0

Outcomes = Callable[[str], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What became of every case, of a kind: all of them met one process, with its memory bounded.

    Processes that share the tests share its answers too.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    @cache
    def of_kind(kind: str) -> dict[str, dict[str, Any]]:
        args = ["signed"] if kind in SIGNED_KINDS else []
        answers = shared / "-".join(["hostile", *args, "answers.jsonl"])
        with FileLock(answers.with_suffix(".lock")):
            if not answers.exists():
                answers.write_text(_present(*args), encoding="utf-8")
        lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
        found = {line["id"]: line for line in lines if line["kind"] == kind}
        assert len(found) == len(lines) / 2 == len(CORPUS) + len(SCENES)
        return found

    return of_kind


def _present(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.follow_cases", *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("kind", [*KINDS, *SIGNED_KINDS])
def test_a_follower_gets_to_the_head_of_a_sound_chain(
    outcomes: Outcomes, scene: str, kind: str
) -> None:
    found = outcomes(kind)[f"{CONTROL}: {scene}"]
    assert found["error"] == "", found["message"]
    assert found["reached"]
    assert not found["untouched"]
    assert found["held"] == found["remembered"] != 0


@pytest.mark.full
@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.id)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_object_is_refused_and_nothing_is_written(
    outcomes: Outcomes, case: Case, kind: str
) -> None:
    found = outcomes(kind)[case.id]
    assert found["seconds"] < SECONDS
    assert found["stored"]
    if case.error is None:
        assert (found["error"], found["reached"]) == ("", True), found["message"]
        return
    assert found["error"] == case.error.__name__, found["message"]
    assert found["key"] == case.at
    assert found["untouched"]
    assert found["remembered"] == 0
    assert found["held"] == (None if case.poisons or case.opens else 0)


@pytest.mark.full
@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.id)
@pytest.mark.parametrize("kind", SIGNED_KINDS)
def test_a_follower_with_trusted_keys_takes_the_signed_bits_or_nothing(
    outcomes: Outcomes, case: Case, kind: str
) -> None:
    found = outcomes(kind)[case.id]
    assert found["seconds"] < SECONDS
    assert found["stored"]
    if case.error is None and found["error"] == "":
        assert found["reached"]
        return
    errors = {error.__name__ for error in (SignatureError, case.error) if error}
    assert found["error"] in errors, found["message"]
    assert found["untouched"]
    assert found["remembered"] == 0
    assert found["held"] in ({None} if case.opens else {None, 0} if case.poisons else {0})


@pytest.mark.full
def test_signatures_are_what_refuses_most_forged_documents(outcomes: Outcomes) -> None:
    found = outcomes(KEEPS)
    refused = [case.level for case in CORPUS if found[case.id]["error"] == "SignatureError"]
    assert set(refused) == {"part", "record", "table", "manifest", "chain"}
    assert len(refused) > 300


def test_the_corpus_has_every_category_at_every_level() -> None:
    count = Counter((case.level, case.category) for case in CORPUS)
    wanted = {
        (level, category)
        for level in get_args(Level)
        for category in get_args(Category)
        if category != "unsorted" or level in ORDERED
    }
    assert wanted - count.keys() == set()
    assert len({case.id for case in CORPUS}) == len(CORPUS) > 300
    refused = Counter(case.level for case in CORPUS if case.error is not None)
    assert min(refused[level] for level in ("part", "manifest", "record", "table", "chain")) > 30

"""What is hostile to one kind of target alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deltachain.chain.chain import Chain
from deltachain.checkpoint import read_assets
from deltachain.codec import Part, encode_part
from deltachain.errors import BaseMismatchError, BrokenChainError, TensorMismatchError
from deltachain.format.documents import Edge, ObjectRef, Table
from deltachain.format.keys import object_digest, payload_key
from deltachain.store import MemoryStore
from deltachain.subscribe import FolderTarget, Subscriber
from deltachain.subscribe.targets.folder import write_assets
from deltachain.types import StateDigest, TensorSpec
from tests.format.forge import take_apart
from tests.format.forgeries import PARTS
from tests.format.freeze import Builder, as_max, step
from tests.hostile.scene import Scene

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


@pytest.mark.parametrize(
    ("scene", "stream"),
    [("step", "sign"), ("overwrite", "value.0"), ("max", "tile"), ("dense", "dense.0")],
)
def test_an_altered_tensor_is_named_even_if_every_object_fits(scene: str, stream: str) -> None:
    forged = Scene(scene)
    pieces = take_apart(forged.read("part"))
    altered = bytearray(pieces.streams[f"#0.{stream}"])
    altered[0] ^= 1
    pieces.streams[f"#0.{stream}"] = bytes(altered)
    forged.put("part", pieces.build())
    target = {forged.spec.name: torch.zeros(forged.spec.shape, dtype=torch.bfloat16)}
    follower = Subscriber(forged.store.url, target, store=forged.store)
    follower.update(0)
    before = target[forged.spec.name].clone()
    with pytest.raises(BaseMismatchError, match=r"first to differ: 'w'"):
        follower.update()
    assert torch.equal(target[forged.spec.name], before)


@pytest.mark.parametrize("scene", ["step", "max"])
def test_a_delta_that_leads_elsewhere_is_called_damaged(scene: str) -> None:
    forged = Scene(scene)
    old = np.ones(forged.spec.numel, forged.spec.bits_dtype)
    new = old.copy()
    new[3] += new.dtype.type(5)
    make = {"step": step, "max": as_max}[scene]
    forged.put("part", encode_part([make(forged.spec, old, new)]).data)
    target = {forged.spec.name: torch.zeros(forged.spec.shape, dtype=torch.bfloat16)}
    follower = Subscriber(forged.store.url, target, store=forged.store)
    follower.update(0)
    before = target[forged.spec.name].clone()
    with pytest.raises(BaseMismatchError, match="each tensor changes as the delta says") as caught:
        follower.update()
    assert "deltachain verify" in caught.value.hint
    assert torch.equal(target[forged.spec.name], before)


def test_a_whole_tensor_is_not_named_where_the_target_differed() -> None:
    honest = Scene("dense")
    target = {honest.spec.name: torch.zeros(honest.spec.shape, dtype=torch.bfloat16)}
    follower = Subscriber(honest.store.url, target, store=honest.store)
    follower.update(0)
    target[honest.spec.name].data.zero_()  # torch does not count it
    with pytest.raises(BaseMismatchError) as caught:
        follower.update()
    assert "first to differ" not in str(caught.value)


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

"""Changes of many tensors decoded at once where the weights are: bit for bit as on the host."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch

from deltachain.chain.tensor_plan import TensorPlan
from deltachain.codec import Part
from deltachain.errors import DigestMismatchError, FormatError
from deltachain.kernels import staging
from deltachain.kernels.torch_kernels import INT_DTYPES
from deltachain.replica.batches import DeviceStager, DeviceWrite, HostStager
from deltachain.replica.placements import Placement
from deltachain.replica.rank import RankService
from deltachain.replica.settings import RankSettings
from deltachain.replica.spool import object_file
from deltachain.replica.staged import RankStaged
from deltachain.subscribe.proof import Effect
from deltachain.subscribe.targets.tensor_patch import prepare
from deltachain.subscribe.targets.tensor_patch import write as write_patch
from deltachain.types import StateDigest
from tests.format.forge import take_apart
from tests.format.forgeries import FORGERIES, PARTS, forged
from tests.gpu.ranks import Bench
from tests.support.engine import Sharding, full_of
from tests.support.values import present
from tests.unit.replica.replicas import SHAPES, Followed


class OnDevice(Followed):
    """As :class:`Followed`, with ranks that decode on the device that holds their weights."""

    def __init__(self, shape: Sharding, folder: Path, **settings: Any) -> None:
        super().__init__(shape, folder, **settings)
        for number, model in enumerate(self.engine.models):
            place = RankSettings(spool=self.spool, decode="device")
            service = RankService(lambda model=model: model, number, place)  # type: ignore[misc]
            self.engine.services[number] = service

    def staged(self) -> list[RankStaged]:
        return [list(one.rank.staged.values())[-1] for one in self.engine.services]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter decodes here, as a card does elsewhere; one launch at a time."""
    turn, launch = Lock(), staging.launch

    def launched(*arguments: Any, **constants: Any) -> None:
        with turn:
            launch(*arguments, **constants)

    monkeypatch.setattr(staging, "launch", launched)
    monkeypatch.setattr(staging, "decodes_on", lambda _: True)


SEVERAL = pytest.param(SHAPES["tp2pp2"], id="tp2pp2", marks=pytest.mark.full)
"""Triton's interpreter takes seconds for each shape; tests of the host run all of them."""
REST = [
    pytest.param(shape, id=name, marks=pytest.mark.slow)
    for name, shape in SHAPES.items()
    if name not in ("untied", "tp2pp2")
]


@pytest.fixture(params=[pytest.param(SHAPES["untied"], id="untied"), SEVERAL, *REST])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OnDevice]:
    made = OnDevice(request.param, tmp_path)
    yield made
    made.close()


@pytest.mark.full
def test_versions_are_followed_folded_and_taken_back(here: OnDevice) -> None:
    here.publish(1)
    here.subscriber.update()
    assert here.holds(1)
    assert all(any(isinstance(w, DeviceWrite) for w in one.placed) for one in here.staged())
    here.publish(2, 3, 4)
    here.subscriber.update()
    assert here.holds(4)
    assert any(isinstance(w, DeviceWrite) for w in here.staged()[0].placed)
    here.subscriber.rollback()
    assert here.holds(1)
    here.subscriber.release()
    here.subscriber._poison()
    here.anchor()
    here.publish(5)
    here.subscriber.update()
    assert here.holds(5)


@pytest.mark.full
def test_what_does_not_fit_the_budget_is_read_again(tmp_path: Path) -> None:
    here = OnDevice(Sharding(tp=2), tmp_path, stage_budget=100)
    here.publish(1)
    here.subscriber.update()
    assert here.holds(1)
    assert all(one.deferred for one in here.staged())
    here.close()


@pytest.mark.full
def test_several_batches_are_one_stage(here: OnDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceStager, "group_nbytes", 100)
    monkeypatch.setattr("deltachain.replica.staged.BATCH", 100)
    here.publish(1)
    here.subscriber.update()
    assert here.holds(1)
    assert sum(isinstance(w, DeviceWrite) for w in here.staged()[0].placed) > 1


@pytest.mark.full
@pytest.mark.parametrize("kind", ["step", "mixed", "max"])
def test_the_effect_is_that_of_the_host(tmp_path: Path, kind: str) -> None:
    effects = []
    for place in ("host", "device"):
        bench = Bench("cpu", kind, tmp_path / place)
        bench.rank._decode = place
        bench.rank._stager = None
        before = bench.state()
        effects.append(bench.stage(1))
        bench.rank.swap(1, 1, back=False)
        assert bench.model.holds(bench.new)
        assert bench.state() == before + effects[-1].change
        bench.rank.swap(1, 0, back=True)
        assert bench.model.holds(bench.old)
    assert effects[0] == effects[1]


def test_one_byte_and_a_half_a_change_cross_to_the_device(
    one_percent: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of one million elements, 1 % of which changes by one bit step."""
    crossed = []
    upload = staging.upload

    def counted(batch: Any, device: torch.device) -> Any:
        crossed.append(batch.buffer.nbytes)
        return upload(batch, device)

    monkeypatch.setattr(staging, "upload", counted)
    here = one_percent
    here.subscriber.update()
    (staged,) = here.staged()
    nnz = sum(effect.nnz for effect in staged.effects.values())
    assert here.holds(1)
    assert nnz > 10_000
    assert sum(crossed) <= 1.6 * nnz


def test_what_lies_in_the_spool_is_what_came_over_the_wire(one_percent: OnDevice) -> None:
    here, wire = one_percent, wire_nbytes(one_percent, 1)
    staged = present(here.subscriber.stage())
    (spool,) = here.spools()
    written = sum(file.stat().st_size for file in spool.iterdir())
    assert wire <= written <= 1.1 * wire
    here.subscriber.swap(staged)
    assert here.holds(1)


@pytest.fixture
def one_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnDevice]:
    """A model with a large embedding, and its next version, in which 1 % of it has changed."""
    for name in ("VOCAB", "PADDED"):
        monkeypatch.setattr(f"tests.support.engine.{name}", 1 << 16)
    here = OnDevice(Sharding(), tmp_path)
    here.subscriber.update()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        bits = here.model.get_parameter("embed.weight").view(-1).view(torch.int16)
        at = torch.from_numpy(rng.permutation(bits.numel())[: bits.numel() // 100])
        bits[at] += torch.from_numpy(rng.choice([1, -1], at.numel()).astype(np.int16))
    here.publisher.publish(step=1)
    here.publisher.flush()
    here.truth.append(full_of(here.model))
    yield here
    here.close()


def wire_nbytes(here: OnDevice, version: int) -> int:
    """Bytes of the parts of a version."""
    return sum(part.nbytes for part in here.subscriber.chain.read(version).manifest.edge.parts)


def test_a_damaged_frame_is_refused(tmp_path: Path) -> None:
    bench = Bench("cpu", "step", tmp_path)
    bench.rank._decode = "device"
    bench.rank._stager = None
    file = object_file(bench.spool.folder, 0)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DigestMismatchError):
        bench.stage(1)
    assert bench.rank.staged == {}
    assert bench.model.holds(bench.old)


def outcome(data: bytes, where: str) -> tuple[str, object]:
    """What staging a part on live bits of zeros says: an error, or the new bits and effects."""
    try:
        part = Part.from_bytes(data, key="part")
        found: list[object] = []
        for row in part.directory.tensors:
            live = torch.zeros(row.spec.shape, dtype=INT_DTYPES[row.itemsize])
            place = Placement(live.view(-1), 0, (1,))
            places = {row.name: [(("0", 0), place)]}
            stager = (DeviceStager if where == "device" else HostStager)(
                places, {row.name: row.spec}
            )
            groups, _ = stager.groups([(0, part)]) if where != "tensor" else ((), ())
            if groups and isinstance(stager, DeviceStager):
                for _, write, effects in stager.stage([(one, stager.read(one)) for one in groups]):
                    found += effects.values()
                    write.run()
            elif groups and isinstance(stager, HostStager):
                ((writes, effects),) = map(stager.stage, groups)
                found += effects.values()
                for one in writes:
                    one.run()
            else:
                patch = prepare(place, TensorPlan(row.spec, (part,)).read(0, row.spec.numel))
                found += [patch.effect] if patch.nnz else []
                write_patch(place, patch)
            found.append(live.numpy().tobytes())
    except FormatError as exc:
        return type(exc).__name__, ""
    return "sound", [
        replace(one, written=StateDigest()) if isinstance(one, Effect) else one for one in found
    ]


@pytest.mark.parametrize("name", FORGERIES)
def test_a_hostile_part_is_refused_as_on_the_host(name: str) -> None:
    data = forged(name)
    expected = outcome(data, "tensor")
    assert outcome(data, "device") == outcome(data, "host") == expected
    assert expected[0] != "sound"


VALUES = (0, 1, 2, 3, 77, 127, 128, 200, 254, 255)
"""Bytes that mean something at the edges of streams."""


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_random_streams_are_refused_or_decoded_as_on_the_host(part: str) -> None:
    """Every digest is right, so that only the content is wrong."""
    rng = np.random.default_rng(sum(part.encode()))
    found = set()
    for _ in range(150):
        forgery = take_apart(PARTS[part])
        for _ in range(rng.integers(1, 3)):
            name = list(forgery.streams)[rng.integers(len(forgery.streams))]
            stream = bytearray(forgery.streams[name])
            stream[rng.integers(len(stream))] = VALUES[rng.integers(len(VALUES))]
            forgery.streams[name] = bytes(stream)
        data = forgery.build()
        mine = outcome(data, "device")
        assert mine == outcome(data, "host") == outcome(data, "tensor")
        found.add(mine[0])
    assert "sound" in found


@pytest.mark.full
def test_a_write_that_fails_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = OnDevice(Sharding(tp=2), tmp_path)
    here.publish(1)
    staged = present(here.subscriber.stage())
    write, left = staging.write_, [1]

    def half(changes: Any) -> None:
        if left:
            left.pop()
            write(replace(changes, blocks=changes.blocks[:1]))
            raise torch.OutOfMemoryError("no room")
        write(changes)

    monkeypatch.setattr(staging, "write_", half)
    with pytest.raises(Exception, match="no room"):
        here.subscriber.swap(staged)
    assert here.holds(0)
    here.subscriber.update()
    assert here.holds(1)
    here.close()

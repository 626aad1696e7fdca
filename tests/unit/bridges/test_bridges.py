"""Receivers here are written from the other systems' descriptions; they share no code with ours."""

import json
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
import zstandard
from safetensors.numpy import save
from torch import Tensor

import deltachain
from deltachain import errors
from deltachain.bridges import DIALECTS, dialect_of
from deltachain.bridges.dialect import HostModel
from deltachain.bridges.export import RECORD, Exported, Exporter, HostCopy
from deltachain.bridges.imports import Importer
from deltachain.kernels import host
from deltachain.kernels.arrays import Changes
from deltachain.store import Store, open_store
from deltachain.types import TensorSpec
from tests.bench.layouts import load
from tests.support.values import present
from tests.unit.cli.support import ok, refused, running

Bytes: TypeAlias = dict[str, npt.NDArray[np.uint8]]

SPECIAL = np.array([0x8000, 0x0000, 0x7FC1, 0xFFC3, 0x7F81, 0xFF80], np.uint16)
"""-0.0, 0.0, NaNs quiet, negative and signalling, and -inf."""

INDEX = "model.safetensors.index.json"


class Run:
    """A trainer's weights, published as a chain, and exported into ``out``."""

    def __init__(
        self, root: Path, dialect: str, *, full_every: int = 0, files: Store | None = None
    ) -> None:
        rng = np.random.default_rng(5)
        self.bits = {
            "big": rng.integers(0, 1 << 16, 200_003, np.uint16),
            "l.w": rng.integers(0, 1 << 16, 640, np.uint16),
            "still": rng.integers(0, 1 << 16, 9, np.uint16),
        }
        self.chain, self.out, self.dialect = root / "chain", root / "out", dialect
        self.full_every, self.files = full_every, files or open_store(str(self.out))
        self.publisher = deltachain.Publisher(str(self.chain)).attach(self.tensors)
        self.exporter = self.restart()
        self.done = [self.write()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, bits in self.bits.items():
            found = torch.from_numpy(bits).view(torch.bfloat16)
            yield name, found.view(64, 10) if name == "l.w" else found

    def restart(self) -> Exporter:
        self.subscriber = deltachain.Subscriber(str(self.chain), HostCopy())
        layout = self.dialect, dialect_of(self.dialect)
        return Exporter(self.subscriber, self.files, layout, full_every=self.full_every)

    def step(self) -> None:
        number = self.publisher.version + 1
        for name in ("big", "l.w"):
            rng = np.random.default_rng(number)
            bits = self.bits[name]
            where = rng.choice(bits.size, bits.size // 90, replace=False)
            bits[where] ^= rng.integers(1, 1 << 16, where.size, np.uint16)
            bits[number : number + SPECIAL.size] = np.roll(SPECIAL, number)
        self.publisher.publish(step=number).result()

    def write(self) -> Exported:
        self.subscriber.update()
        return self.exporter.write(present(self.subscriber.version))

    def raw(self) -> Bytes:
        return {name: bits.view(np.uint8).copy() for name, bits in self.bits.items()}

    def close(self) -> None:
        self.publisher.close()


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, *request.param)
    yield made
    made.close()


def arrays(file: Path) -> Bytes:
    return {n: np.frombuffer(data, np.uint8).copy() for n, data in load(file.read_bytes()).items()}


def metadata(file: Path) -> dict[str, str]:
    data = file.read_bytes()
    found = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert isinstance(found, dict)
    return found


def receive(dialect: str, out: Path, key: str, weights: Bytes) -> Bytes:
    """What a receiver holds after one version, named by the object that commits it."""
    folder, file = (out / key).parent, out / key
    if dialect.startswith("trl"):
        return receive_trl(file, weights)
    document = json.loads(file.read_bytes())
    if "tensors" in document:
        for row in document["tensors"]:
            frame = arrays(folder / row["payload_file"])[row["payload_key"]]
            xor(weights, row["name"], frame)
            assert xxhash.xxh3_128_hexdigest(weights[row["name"]].data) == row["checksum"]
        return weights
    files = sorted(set(document["weight_map"].values()))
    if "delta_encoding" not in document["metadata"]:
        return {name: one for shard in files for name, one in arrays(folder / shard).items()}
    adler = document["metadata"]["checksum_format"] == "adler32"
    for shard in files:
        said = metadata(folder / shard)
        for name, frame in arrays(folder / shard).items():
            xor(weights, name, frame)
            new = weights[name].data
            assert said[name] == (
                f"{zlib.adler32(new):08x}" if adler else xxhash.xxh3_128_hexdigest(new)
            )
    return weights


def xor(weights: Bytes, name: str, frame: npt.NDArray[np.uint8]) -> None:
    difference = zstandard.ZstdDecompressor().decompress(frame.tobytes())
    weights[name] ^= np.frombuffer(difference, np.uint8)


def receive_trl(file: Path, weights: Bytes) -> Bytes:
    found, said = arrays(file), metadata(file)
    assert int(said["model_version"]) == int(file.stem.partition("_")[2])
    if said["sparse"] == "False":
        return found
    gaps = said.get("encoding") == "gap_delta"
    for name in {key.rpartition(".")[0] for key in found}:
        values = found[f"{name}.val" if gaps else f"{name}.values"].view(np.uint16)
        stored = found[f"{name}.idx" if gaps else f"{name}.indices"]
        if gaps and values.size:
            wide = stored.view(f"<u{stored.size // values.size}").astype(np.int64)
            places = np.cumsum(wide + 1) - 1
        else:
            places = stored.view("<i4")
        weights[name].view(np.uint16)[places] = values
    return weights


def same(one: Bytes, other: Bytes) -> None:
    assert one.keys() == other.keys()
    for name, bits in one.items():
        assert np.array_equal(bits, other[name]), name


def model_of(chain: Path) -> HostModel:
    target = HostCopy()
    deltachain.Subscriber(str(chain), target).update()
    return HostModel(target.specs, target.bits)


def raw(model: HostModel) -> Bytes:
    return {name: model.bits(name).view(np.uint8) for name in model.specs}


@pytest.mark.parametrize("run", [(one,) for one in DIALECTS], ids=list(DIALECTS), indirect=True)
def test_receivers_follow_and_the_files_become_the_same_chain(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltachain.bridges.files.SHARD_NBYTES", 1 << 10)  # of several files
    out, copy = open_store(str(run.out)), tmp_path / "copy"
    followed = receive(run.dialect, run.out, run.done[0].key, {})
    config = deltachain.PublishConfig(url=str(copy))
    importer = Importer(out, dialect_of(run.dialect), config)
    for number in range(1, 6):
        if number == 4:  # both ends restart
            run.exporter = run.restart()
            importer.close()
            importer = Importer(out, dialect_of(run.dialect), config)
        run.step()
        run.done.append(run.write())
        assert run.done[-1].full == (run.dialect == "checkpoint")
        followed = receive(run.dialect, run.out, run.done[-1].key, followed)
        same(followed, run.raw())
        assert [receipt.step for receipt in importer.versions()][-1] == number
        same(raw(model_of(copy)), run.raw())
    importer.close()
    late: Bytes = {}
    for one in run.done:
        late = receive(run.dialect, run.out, one.key, late)
    same(late, run.raw())
    steps = [
        one.manifest.step for one in deltachain.Chain.open(open_store(str(copy))).history(0, 6)
    ]
    assert None not in steps[1:]


@pytest.mark.parametrize("run", [("slime",), ("trl",)], ids=["slime", "trl"], indirect=True)
def test_full_versions_serve_newcomers_and_a_chain_that_was_pruned(
    run: Run, tmp_path: Path
) -> None:
    run.full_every = 2
    run.exporter = run.restart()
    for _ in range(3):
        run.step()
        run.done.append(run.write())
    assert [one.full for one in run.done] == [True, False, True, False]
    newcomer: Bytes = {}
    for one in run.done[2:]:
        newcomer = receive(run.dialect, run.out, one.key, newcomer)
    same(newcomer, run.raw())
    with Importer(
        open_store(str(run.out)),
        dialect_of(run.dialect),
        deltachain.PublishConfig(url=str(tmp_path / "late")),
    ) as importer:
        assert [one.step for one in importer.versions()] == [2, 3]


def test_an_exporter_whose_version_is_gone_starts_over_or_says_why(tmp_path: Path) -> None:
    for dialect in ("slime", "skyrl"):
        run = Run(tmp_path / dialect, dialect)
        record = msgspec.json.decode((run.out / RECORD).read_bytes())
        run.step()
        run.close()
        ok("anchor", run.chain)
        next(iter(sorted((run.chain / "manifests").rglob("*.json")))).unlink()
        if dialect == "skyrl":
            with pytest.raises(errors.DeltaChainError) as caught:
                run.restart()
            assert "new folder" in caught.value.hint
        else:
            run.exporter = run.restart()
            assert run.write().full
        (run.out / RECORD).write_bytes(msgspec.json.encode(record | {"chain": "0" * 32}))
        with pytest.raises(errors.ChainMismatchError, match="expected"):
            run.restart()


KILLED = """
import os, signal, sys
from deltachain.store import FileStore
from tests.unit.bridges.test_bridges import *
put, left = FileStore.put, [int(sys.argv[3])]
def dying(store, key, data):
    if ".part" in store.url or sys.argv[2].startswith("trl"):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return put(store, key, data)
FileStore.put = dying
subscriber = deltachain.Subscriber(sys.argv[1] + "/chain", HostCopy())
layout = sys.argv[2], dialect_of(sys.argv[2])
exporter = Exporter(subscriber, open_store(sys.argv[1] + "/out"), layout)
subscriber.update()
exporter.write(subscriber.version)
"""


@pytest.mark.parametrize("run", [("slime",)], ids=["slime"], indirect=True)
def test_a_killed_export_leaves_nothing_that_a_receiver_sees(run: Run, tmp_path: Path) -> None:
    run.step()
    before = sorted(one.name for one in run.out.iterdir())
    for puts in (0, 1):  # of the file of changes, and of the index
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(tmp_path), run.dialect, str(puts)], check=False
        )
        assert killed.returncode == -signal.SIGKILL
        assert sorted(one.name for one in run.out.iterdir() if one.name[0] != ".") == before
    run.exporter = run.restart()
    followed = receive(run.dialect, run.out, run.done[0].key, {})
    done = run.write()
    assert not done.full
    same(receive(run.dialect, run.out, done.key, followed), run.raw())
    assert not (run.out / ".part").exists()


KILLED_IMPORT = """
import os, signal, sys
from deltachain.store import FileStore
from tests.unit.bridges.test_bridges import *
def dying(put, left):
    def counted(store, key, *rest):
        if "copy" in store.url and "publisher.json" not in key:  # a thread renews that
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return put(store, key, *rest)
    return counted
def run(copy, puts):
    child = os.fork()  # nothing here has a thread yet
    if child:
        return os.waitpid(child, 0)[1]
    left = [puts]
    for name in ("put", "put_if_absent", "upload", "reveal"):
        setattr(FileStore, name, dying(getattr(FileStore, name), left))
    out, config = open_store(sys.argv[1] + "/out"), deltachain.PublishConfig(url=copy)
    with Importer(out, dialect_of(sys.argv[2]), config) as one:
        list(one.versions())
    os._exit(0)
for puts in range(1000):
    copy = f"{sys.argv[1]}/copy{puts}"
    killed = run(copy, puts)
    assert run(copy, 1 << 30) == 0
    if killed == 0:
        break
print(puts)
"""


@pytest.mark.full
@pytest.mark.parametrize("run", [("slime",), ("trl",)], ids=["slime", "trl"], indirect=True)
def test_an_import_killed_at_any_write_goes_on_and_loses_and_doubles_nothing(
    run: Run, tmp_path: Path
) -> None:
    states = [run.raw()]
    for _ in range(2):
        run.step()
        run.done.append(run.write())
        states.append(run.raw())
    words = [sys.executable, "-c", KILLED_IMPORT, str(tmp_path), run.dialect]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    kills = int(done.stdout.split()[-1])
    assert kills > 8  # identity, an anchor, and two versions with their parts
    for number in range(kills + 1):
        store = open_store(f"{tmp_path}/copy{number}")
        chain = deltachain.Chain.open(store)
        versions = list(chain.history(0, present(chain.head()).version))
        changed = [one.manifest.step for one in versions if one.manifest.nnz and one.version]
        assert changed == [1, 2]
        assert versions[-1].manifest.step == 2
        for one in versions:
            target = HostCopy()
            deltachain.Subscriber(store.url, target).update(one.version)
            same(raw(HostModel(target.specs, target.bits)), states[one.manifest.step or 0])


@pytest.mark.parametrize("run", [(one,) for one in DIALECTS], ids=list(DIALECTS), indirect=True)
def test_files_cut_short_or_changed_are_refused_and_nothing_is_published(
    run: Run, tmp_path: Path
) -> None:
    copy, out, layout = tmp_path / "copy", open_store(str(run.out)), dialect_of(run.dialect)
    importer = Importer(out, layout, deltachain.PublishConfig(url=str(copy)))
    list(importer.versions())
    before, head = model_of(copy), deltachain.Chain.open(open_store(str(copy))).head()
    run.step()
    key = run.write().key
    is_proven = not run.dialect.startswith(("trl", "checkpoint"))  # by checksums in the files
    marker, rng = run.out / key, np.random.default_rng(1)
    for file in {marker, *(marker.parent.glob("*.safetensors") if is_proven else ())}:
        whole = file.read_bytes()
        bad = [whole[:at] for at in (0, 7, len(whole) // 3, len(whole) - 1)]
        places = rng.integers(0, len(whole), 20) if is_proven else [1, 3, 9]
        bad += [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in places]
        for data in bad:
            file.write_bytes(data)
            try:
                found = layout.read(out, key, before)
                before.check_same(found, key)
                bits = raw(found)
            except (errors.FormatError, errors.ObjectNotFoundError):
                continue
            same(bits, run.raw())  # white space, or a field that nobody reads
        file.write_bytes(bad[2])
        with pytest.raises(errors.FormatError):
            list(importer.versions())
        assert deltachain.Chain.open(open_store(str(copy))).head() == head
        file.write_bytes(whole)
    assert [one.step for one in importer.versions()] == [1]
    importer.close()
    same(raw(model_of(copy)), run.raw())


ROW = {
    "name": "w",
    "dtype": "bfloat16",
    "shape": [4],
    "uncompressed_num_bytes": 8,
    "compressed_num_bytes": 1,
    "payload_file": "p.safetensors",
    "payload_key": "w",
    "checksum": "0",
}
SAID = {"format": "sparse_weight_patch", "version": "1", "sparse": "True", "model_version": "1"}
ZEROS = np.zeros(4, np.uint8)
BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 24))
INDEXED = {"version": "000001", "base_version": "000000", "compression_format": "zstd"}


def indexed(name: str = "w", file: str = "a.safetensors", **said: str) -> bytes:
    fields = INDEXED | {"delta_encoding": "xor", "checksum_format": "adler32"} | said
    return json.dumps({"metadata": fields, "weight_map": {name: file}}).encode()


def manifest(**row: object) -> bytes:
    return json.dumps({"version": 1, "base_version": 0, "tensors": [ROW | row]}).encode()


def frame(data: bytes = BOMB) -> bytes:
    return save({"w": np.frombuffer(data, np.uint8)}, metadata={"w": "0"})


def patch(indices: list[int], encoding: str = "gap_delta", kind: type = np.uint16) -> bytes:
    values = np.zeros(2 * len(indices), np.uint8)
    rows: dict[str, npt.NDArray[Any]] = {"w.idx": np.array(indices, kind)}
    data = save(rows, metadata=SAID | {"encoding": encoding})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    end = header["w.idx"]["data_offsets"][1]
    offsets = [end, end + values.nbytes]
    header["w.val"] = {"dtype": "BF16", "shape": [len(indices)], "data_offsets": offsets}
    text = json.dumps(header).encode()
    body = rows["w.idx"].tobytes() + values.tobytes()
    return len(text).to_bytes(8, "little") + text + body


V1 = f"weight_v000001/{INDEX}"
D1 = "delta-00000001/manifest.json"
T1 = "deltas/step_000001.safetensors"


@pytest.mark.parametrize(
    ("dialect", "key", "files", "said"),
    [
        ("slime", V1, {V1: indexed(file="../a.safetensors")}, "not the name of a file"),
        ("slime", V1, {V1: indexed(version="000002")}, "expected"),
        ("slime", V1, {V1: indexed(), "a": frame()}, "claims 16777216 bytes, expected 8"),
        ("slime", V1, {V1: indexed(delta_encoding="overwrite"), "a": frame()}, "a frame of 167"),
        ("slime", V1, {V1: indexed(delta_encoding="add"), "a": frame()}, "changes as 'add'"),
        ("slime", V1, {V1: indexed(name="other"), "a": frame()}, "which the model has not"),
        ("skyrl", D1, {D1: manifest(payload_file="../../x")}, "not the name of a file"),
        ("skyrl", D1, {D1: manifest(dtype="float32")}, "is float32"),
        ("skyrl", D1, {D1: manifest(shape=[-4])}, "is bfloat16"),
        ("trl", T1, {T1: patch([0, 0, 0, 0, 0])}, "more values than elements"),
        ("trl", T1, {T1: patch([0, 3])}, "outside 4 elements"),
        ("trl", T1, {T1: patch([2, 1], "raw", np.int32)}, "not strictly increasing"),
        ("trl", T1, {T1: patch([-1], "raw", np.int32)}, "outside 4 elements"),
        ("trl", T1, {T1: patch([0], "nvcomp_cascaded")}, "positions as 'nvcomp_cascaded'"),
    ],
)
def test_lies_are_named_before_they_are_believed(
    tmp_path: Path, dialect: str, key: str, files: dict[str, bytes], said: str
) -> None:
    store = open_store(str(tmp_path))
    for name, data in files.items():
        store.put("weight_v000001/a.safetensors" if name == "a" else name, data)
    spec = TensorSpec("w", "BF16", (4,))
    before = HostModel({"w": spec}, lambda _: np.zeros(4, np.uint16))
    with pytest.raises(errors.FormatError, match=said):
        raw(dialect_of(dialect).read(store, key, before))


def test_gaps_bases_and_dtypes_are_refused_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path, "slime")
    for _ in range(3):
        run.step()
        run.done.append(run.write())
    out, config = open_store(str(run.out)), deltachain.PublishConfig(url=str(tmp_path / "copy"))
    missing = run.out / run.done[2].key
    missing.rename(tmp_path / "kept")
    with Importer(out, dialect_of("slime"), config) as importer:
        with pytest.raises(errors.BrokenChainError, match="version 2, which it builds on"):
            list(importer.versions())
        (tmp_path / "kept").rename(missing)
        assert [one.step for one in importer.versions()] == [2, 3]
    (run.out / run.done[0].key).unlink()
    nowhere = deltachain.PublishConfig(url=str(tmp_path / "other"))
    with pytest.raises(errors.ConfigError, match="changes only, from version 1 on"):
        list(Importer(out, dialect_of("slime"), nowhere).versions())
    run.close()
    with pytest.raises(errors.ConfigError, match="expected one of trl, trl-v1, slime"):
        dialect_of("tensorflow")
    spec = TensorSpec("router.bias", "F32", (4,))
    model = HostModel({spec.name: spec}, lambda _: np.zeros(4, np.uint32))
    with pytest.raises(errors.UnsupportedModelError, match=r"router.bias.*F32"):
        next(dialect_of("trl").full(0, model))


@pytest.mark.parametrize("restarts", [False, True], ids=["same importer", "restarted importer"])
def test_numbers_written_anew_are_no_base_of_later_changes(tmp_path: Path, restarts: bool) -> None:
    old, new = (Run(tmp_path / name, "trl", full_every=5) for name in ("old", "new"))
    new.bits["big"] ^= 1  # a trainer that starts again, from other weights
    for run in (old, new):
        for _ in range(5):
            run.step()
            run.done.append(run.write())
    files = open_store(str(tmp_path / "files"))
    config = deltachain.PublishConfig(url=str(tmp_path / "copy"))

    def write(run: Run, *numbers: int) -> None:
        for number in numbers:
            key = run.done[number].key
            files.put(key, (run.out / key).read_bytes())

    write(old, 0, 1, 2)
    importer = Importer(files, dialect_of("trl"), config)
    assert [one.step for one in importer.versions()] == [0, 1, 2]
    write(old, 1, 2, 3)  # the same bits at another time
    assert [one.step for one in importer.versions()] == [3]
    write(new, 0, 1, 2, 3)
    assert not list(importer.versions())
    if restarts:
        importer.close()
        importer = Importer(files, dialect_of("trl"), config)
    write(new, 4)
    for _ in range(2):
        with pytest.raises(errors.BrokenChainError, match=r"version 3, which .* was written anew"):
            list(importer.versions())
    assert importer.held == 3
    write(new, 5)  # a full one
    assert [one.step for one in importer.versions()] == [5]
    same(raw(model_of(tmp_path / "copy")), new.raw())
    importer.close()
    old.close()
    new.close()


def test_an_interrupted_import_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, config = Run(tmp_path, "skyrl"), deltachain.PublishConfig(url=str(tmp_path / "copy"))
    for _ in range(3):
        run.step()
        run.done.append(run.write())
    with Importer(open_store(str(run.out)), dialect_of("skyrl"), config) as importer:
        diff_ = host.diff_

        def interrupted(*bits: Any) -> Changes:
            if (found := diff_(*bits)).indices.size:
                monkeypatch.undo()
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(host, "diff_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(importer.versions())
        list(importer.versions())
    same(raw(model_of(tmp_path / "copy")), run.raw())
    run.close()


def test_a_folder_that_somebody_else_wrote_is_not_replaced(tmp_path: Path) -> None:
    run, out = Run(tmp_path / "run", "checkpoint"), tmp_path / "out"
    theirs = out / f"checkpoint-{run.done[0].version}" / "optimizer.pt"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"state")
    with deltachain.Subscriber(str(run.chain), HostCopy()) as subscriber:
        dialect = "checkpoint", dialect_of("checkpoint")
        exporter = Exporter(subscriber, open_store(str(out)), dialect)
        version = present(subscriber.update()).version
        with pytest.raises(errors.ConfigError, match=f"no {RECORD} names it"):
            exporter.write(version)
    run.close()
    assert list(out.rglob("*")) == [theirs.parent, theirs]
    assert theirs.read_bytes() == b"state"


@pytest.mark.parametrize("run", [("skyrl",)], ids=["skyrl"], indirect=True)
def test_commands_export_and_import(run: Run, tmp_path: Path) -> None:
    out, copy = tmp_path / "files", tmp_path / "copy"
    words = ("export", run.chain, out, "--dialect", "skyrl")
    back = ("import", out, copy, "--dialect", "skyrl")
    assert ok(*words, "--json").document["full"]
    assert "number 0" in ok(*back).stdout
    follow = ("--follow", "--poll", 0.1)
    with running(*words, *follow) as exports, running(*back, *follow) as imports:
        for number in (1, 2):
            run.step()
            assert f"version {number}  changes" in exports.line()
            assert f"number {number}" in imports.line()
            same(raw(model_of(copy)), run.raw())
        assert exports.end(signal.SIGTERM).code == 0
        assert imports.end(signal.SIGINT).code == 130
    refused(*words, "--full-every", 3, code=2, said="leave --full-every out")
    refused("import", out, copy, "--dialect", "nemo", code=2, said="dialect 'nemo'")

import errno
import json
import os
import resource
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deltachain import PublishConfig
from deltachain.chain.chain import Chain
from deltachain.checkpoint import Checkpoint, read_assets, write_atomic
from deltachain.disk_space import NoRoomError, check_room, fill_holes, hint_for, reserve
from deltachain.errors import ConfigError, DeltaChainError, MalformedError
from deltachain.file_access import WINDOW_NBYTES, FileBits, FileReader
from deltachain.publish.push import push
from deltachain.store import MemoryStore
from deltachain.types import TensorSpec
from tests.support.faults import Fault, FaultyStore

BEFORE, AFTER = b"header: ", b"the next tensor"


def file_of(path: Path, bits: np.ndarray) -> Path:
    path.write_bytes(BEFORE + bits.tobytes() + AFTER)
    return path


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "U64"])
def test_elements_are_written_where_they_lie_and_nowhere_else(tmp_path: Path, dtype: str) -> None:
    spec = TensorSpec("w", dtype, (WINDOW_NBYTES + 5,))
    rng = np.random.default_rng(1)
    truth = np.frombuffer(rng.bytes(spec.nbytes), spec.bits_dtype).copy()
    place = FileBits(file_of(tmp_path / "w", truth), len(BEFORE), spec)
    window = WINDOW_NBYTES // spec.itemsize
    edges = [0, 1, window - 1, window, spec.numel - 1]
    indices = np.unique([*edges, *rng.integers(0, spec.numel, 999)])
    new = np.frombuffer(rng.bytes(indices.size * spec.itemsize), spec.bits_dtype)
    assert np.array_equal(place.read(0, spec.numel), truth)
    place.put(indices, new)
    truth[indices] = new
    assert np.array_equal(place.read(0, spec.numel), truth)  # the map shows it, too
    assert (tmp_path / "w").read_bytes() == BEFORE + truth.tobytes() + AFTER
    place.put(None, truth[::-1])
    assert (tmp_path / "w").read_bytes() == BEFORE + truth[::-1].tobytes() + AFTER


@pytest.mark.parametrize("indices", [np.empty(0, np.int64), None])
def test_a_tensor_without_elements_takes_none(tmp_path: Path, indices: np.ndarray | None) -> None:
    place = FileBits(file_of(tmp_path / "w", np.empty(0, "<u2")), 8, TensorSpec("w", "BF16", (0,)))
    place.put(indices, np.empty(0, "<u2"))
    assert place.read(0, 0).size == 0
    assert (tmp_path / "w").read_bytes() == BEFORE + AFTER


def test_room_is_taken_and_holes_are_filled(tmp_path: Path) -> None:
    reserved, filled, empty = (tmp_path / name for name in ("reserved", "filled", "empty"))
    for file in (reserved, filled):
        file.write_bytes(b"x" * 4096)
    reserve(reserved, 1 << 20)
    os.truncate(filled, 1 << 20)
    fill_holes(filled)
    for file in (reserved, filled):
        assert file.read_bytes() == (b"x" * 4096).ljust(1 << 20, b"\0")
        assert file.stat().st_blocks * 512 >= 1 << 20
    reserve(reserved, 0)
    empty.touch()
    fill_holes(empty)


def test_what_is_missing_is_counted(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    with pytest.raises(NoRoomError) as caught:
        check_room(tmp_path, status.f_blocks * status.f_frsize * 2)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.missing >= status.f_blocks * status.f_frsize
    assert f"{caught.value.missing:,} bytes are missing" in hint_for(caught.value, tmp_path)
    check_room(tmp_path, 1)


def test_every_cause_has_its_own_hint(tmp_path: Path) -> None:
    causes = (errno.ENOSPC, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EMFILE, errno.ENFILE)
    hints = {hint_for(OSError(number, "x"), tmp_path) for number in causes}
    assert len(hints) == len(causes)
    assert "" not in hints
    assert hint_for(ValueError("x"), tmp_path) == ""


ROWS = 1 << 18


def tensors(fill: float, count: int = 4, rows: int = 8) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((rows, 4), fill + n, dtype=torch.bfloat16) for n in range(count)}


def save(file: Path, fill: float = 1.0, *, count: int = 4, rows: int = 8) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors(fill, count, rows), file)
    return file


def index(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def first_of(folder: Path, name: str = "w0") -> float:
    bits = Checkpoint(folder).bits(name)
    return torch.from_numpy(bits.view("<i2")).view(torch.bfloat16)[0].item()


def cut(file: Path) -> None:
    os.truncate(file, 4096)


def rewrite(file: Path) -> None:
    data = file.read_bytes()
    with file.open("r+b") as out:
        out.seek(len(data) // 2)
        out.write(bytes(len(data) // 2))


def replace_file(file: Path) -> None:
    other = file.with_suffix(".tmp")
    save_file(tensors(9.0, rows=ROWS), other)
    other.replace(file)


@pytest.mark.parametrize("meddle", [cut, rewrite, replace_file])
def test_a_checkpoint_that_changes_during_a_push_is_refused_and_nothing_committed(
    tmp_path: Path, meddle: Callable[[Path], None]
) -> None:
    file = save(tmp_path / "c/model.safetensors", rows=ROWS)
    store = FaultyStore(MemoryStore(), Fault(lambda: meddle(file)))
    with pytest.raises(DeltaChainError, match=r"model\.safetensors was (cut|written)") as caught:
        push(store, file.parent, PublishConfig(url=store.url))
    assert "new folder" in caught.value.hint
    assert not list(store.list("manifests/"))


def test_a_checkpoint_that_was_cut_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "c/model.safetensors", rows=ROWS)
    checkpoint = Checkpoint(file.parent)
    cut(file)
    with pytest.raises(MalformedError, match="was cut while it was read"):
        checkpoint.bits("w3")
    with pytest.raises(MalformedError):
        list(checkpoint.files())


def test_followed_and_delta_files_that_were_cut_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes(bytes(1 << 20))
    place = FileBits(file, 0, TensorSpec("w", "U8", (1 << 20,)))
    cut(file)
    with pytest.raises(MalformedError, match="was cut"):
        place.read(0, 1 << 20)
    file = tmp_path / "w"
    file.write_bytes(bytes(1 << 20))
    reader = FileReader(file)
    cut(file)
    with pytest.raises(MalformedError, match="was cut"):
        bytes(reader.read_at(1 << 19, 100))
    (tmp_path / "empty").touch()
    with pytest.raises(MalformedError, match="is empty"):
        FileReader(tmp_path / "empty")
    with pytest.raises(ConfigError, match="No such file"):
        FileReader(tmp_path / "none")


@contextmanager
def few_files(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = sum(1 for _ in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (there + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_tensors_and_files_than_the_process_may_open(tmp_path: Path) -> None:
    places: dict[str, str] = {}
    for n in range(1, 65):
        name = f"model-{n:05}-of-00064.safetensors"
        values = {f"l{n}.w{k}": torch.ones(4, 4, dtype=torch.bfloat16) * k for k in range(4)}
        save_file(values, tmp_path / name)
        places |= dict.fromkeys(values, name)
    index(tmp_path, places)
    with few_files(32):
        store = MemoryStore()
        pushed = push(store, tmp_path, PublishConfig(url=store.url))
        assert pushed.head.version == 0
        assert len(Chain.open(store).table.tensors) == 256


@pytest.mark.parametrize(
    "other",
    [
        "consolidated.safetensors",
        "model.fp32.safetensors",
        "model-00001-of-00001.safetensors",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "original/model.safetensors",
    ],
)
def test_of_two_sets_the_models_own_is_published_and_the_other_named(
    tmp_path: Path, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "c/model.safetensors", 1.0)
    save(tmp_path / "c" / other, 5.0, count=6)
    assert first_of(tmp_path / "c") == 1.0
    assert set(Checkpoint(tmp_path / "c").specs) == set(tensors(1.0))
    if "/" not in other:
        assert f"ignoring {other}" in caplog.text


def test_one_file_of_another_name_is_a_set(tmp_path: Path) -> None:
    save(tmp_path / "one/consolidated.safetensors", 3.0)
    assert first_of(tmp_path / "one") == 3.0


def refused(folder: Path, why: str) -> None:
    store = MemoryStore()
    with pytest.raises(ConfigError, match=why) as caught:
        push(store, folder, PublishConfig(url=store.url))
    assert caught.value.hint
    assert not list(store.list(""))


ONE = dict.fromkeys(tensors(1.0), "one.safetensors")
INDICES = {
    "absent tensor": (ONE | {"w9": "one.safetensors"}, "'w9' in one.safetensors, which does not"),
    "absent shard": (ONE | {"x": "three.safetensors"}, "three.safetensors is missing"),
    "two shards": (ONE | {"w3": "two.safetensors"}, "is in two files, one.safetensors and two"),
    "not named": (dict.fromkeys(["w0", "w1"], "one.safetensors"), "hold 'w2', which is not in"),
}


@pytest.mark.parametrize("case", INDICES)
def test_an_index_that_is_not_of_its_shards_is_refused(tmp_path: Path, case: str) -> None:
    places, why = INDICES[case]
    save(tmp_path / "c/one.safetensors")
    if case == "two shards":
        save(tmp_path / "c/two.safetensors", 2.0)
    index(tmp_path / "c", places)
    refused(tmp_path / "c", why)


def test_a_half_downloaded_shard_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "c/model.safetensors", rows=ROWS)
    cut(file)
    store = MemoryStore()
    with pytest.raises(MalformedError, match="the file has 4096"):
        push(store, tmp_path / "c", PublishConfig(url=store.url))
    assert not list(store.list(""))


STEMS = [
    "consolidated-{n:05}-of-00002.safetensors",
    "model-{n:05}-of-00002.safetensors",
    "pytorch_model-{n:05}-of-00002.safetensors",
    "diffusion_pytorch_model-{n:05}-of-00002.safetensors",
    "model_{n:05}_of_00002.safetensors",
]
"""Names of shards, as trainers and converters write them."""


def save_shards(folder: Path, stem: str, *numbers: int, prefix: str = "w") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [stem.format(n=n) for n in numbers]
    for n, name in zip(numbers, names, strict=True):
        save_file({f"{prefix}{n}": torch.full((4,), float(n))}, folder / name)
    return names


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("numbers", [(1,), (1, 2)])
def test_shards_without_an_index_are_refused(
    tmp_path: Path, stem: str, numbers: tuple[int, ...]
) -> None:
    """``from_pretrained`` reads none either, and one may be missing."""
    save_shards(tmp_path / "c", stem, *numbers)
    refused(tmp_path / "c", "shards without an index")


def test_half_of_a_set_with_an_index_of_its_own_is_refused(tmp_path: Path) -> None:
    (name,) = save_shards(tmp_path / "c", STEMS[3], 1)
    (tmp_path / "c/diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w1": name, "w2": STEMS[3].format(n=2)}})
    )
    refused(tmp_path / "c", "diffusion_pytorch_model-00002-of-00002.safetensors is missing")


@pytest.mark.parametrize(
    "sets",
    [
        (("text-{n:05}-of-00002.safetensors", 1, 2), ("image-{n:05}-of-00002.safetensors", 1, 2)),
        (("pytorch_model-{n:05}-of-00002.safetensors", 1, 2), ("vision.safetensors", 0)),
        (("one.safetensors", 0), ("two.safetensors", 0)),
        (("model.fp16.safetensors", 0), ("model.fp32.safetensors", 0)),
    ],
)
def test_of_two_sets_of_which_none_is_the_models_own_both_are_named_and_refused(
    tmp_path: Path, sets: tuple[tuple[str, ...], ...]
) -> None:
    names = [
        save_shards(tmp_path / "c", stem, *map(int, numbers), prefix=f"s{n}.")
        for n, (stem, *numbers) in enumerate(sets)
    ]
    refused(tmp_path / "c", "several sets of weights")
    for files in names:  # the way out
        (tmp_path / "c/model.safetensors.index.json").unlink(missing_ok=True)
        held = {n: f for f in files for n in Checkpoint(tmp_path / "c" / f).specs}
        index(tmp_path / "c", held)
        assert set(Checkpoint(tmp_path / "c").specs) == set(held)


def test_of_two_sets_the_one_with_an_index_of_its_own_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = save_shards(tmp_path / "c", STEMS[2], 1, 2)
    save(tmp_path / "c/vision.safetensors")
    (tmp_path / "c/pytorch_model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w1": names[0], "w2": names[1]}})
    )
    assert set(Checkpoint(tmp_path / "c").specs) == {"w1", "w2"}
    assert "ignoring vision.safetensors" in caplog.text


@pytest.mark.parametrize("shards", [(1, 2), (1,), ()])
def test_an_index_that_an_earlier_save_left_is_ignored_by_name(
    tmp_path: Path, shards: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """``from_pretrained`` of transformers loads ``model.safetensors`` first."""
    save(tmp_path / "c/model.safetensors", 7.0)
    save_shards(tmp_path / "c", STEMS[0], *shards)
    index(tmp_path / "c", {f"w{n}": STEMS[0].format(n=n) for n in (1, 2)})
    assert first_of(tmp_path / "c") == 7.0
    (line,) = caplog.messages
    assert "reading weights from model.safetensors; ignoring " in line
    assert line.endswith("model.safetensors.index.json")


def test_weights_that_are_not_published_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "model.safetensors")
    save(tmp_path / "dense" / "model.safetensors")
    (tmp_path / "2_Dense").mkdir()
    pickles = ["value_head.bin", "2_Dense/pytorch_model.bin", "medusa_lm_head.pt"]
    states = ["pytorch_model.bin", "optimizer.pt", "training_args.bin", "rng_state_0.pth"]
    for name in pickles + states:
        (tmp_path / name).write_bytes(b"pickle")
    read_assets(tmp_path)
    named = {line.rpartition(": weights in ")[2] for line in caplog.messages}
    expected = [*pickles, "dense/model.safetensors"]
    assert named == {f"{name} are not published" for name in expected}


def test_a_link_at_the_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such names are random, so that nobody can plant one."""
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 16)
    (tmp_path / f".config.json.{'0' * 16}").symlink_to(theirs)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "config.json", b"{}")
    assert theirs.read_bytes() == b"theirs"

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deltachain.delta import TensorDelta
from deltachain.errors import MalformedError
from deltachain.kernels import (
    device_diff,
    host,
    numba_kernels,
    segments,
    staging,
    threaded,
    torch_kernels,
)
from deltachain.kernels import torch_kernels as pinned
from deltachain.kernels.device_diff import (
    BLOCK,
    Compared,
    CopyStream,
    DeviceDiff,
    Lane,
    LaneKind,
    compares_on,
)
from deltachain.kernels.protocol import (
    LiveBits,
    digest_change,
    kernels_for,
    move,
    move_at,
    same_bits,
    write_,
)
from deltachain.kernels.segments import (
    LivePlacement,
    PlacementTable,
    StreamLayout,
    TensorStreams,
    pack,
)
from deltachain.types import BITS_DTYPES, TensorSpec
from tests.contract import reference
from tests.contract.batches import Given, batch_of, streams_of
from tests.contract.host import BATCH_CHECKS, HOST_CHECKS, HostArm
from tests.contract.kernels import BIT_CHECKS, CHECKS, LIVE_CHECKS, DeviceArm, pairs
from tests.contract.many_tensors import Weights, settle
from tests.small_disk import run_on_small_disk

CPU = torch.device("cpu")
STEPS = StreamLayout(2, 1, absolute=False)


def scene(numels: tuple[int, ...], density: float, exceptions: float) -> list[Given]:
    """Changes of one tensor each, most of them by 1 or -1."""
    rng = np.random.default_rng(1)
    made = []
    for tensor, numel in enumerate(numels):
        indices = np.flatnonzero(rng.random(numel) < density)
        steps = rng.choice(np.array([1, 65535], np.uint16), indices.size)
        large = rng.random(indices.size) < exceptions
        made.append(Given(tensor, numel, indices, np.where(large, np.uint16(3), steps)))
    return made


def test_one_buffer_may_be_memory_of_the_caller() -> None:
    given = scene((900, 40), 0.3, 0.5)
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    streams = [streams_of(g, STEPS, 700, 0) for g in given]
    batch = pack(STEPS, streams, lambda nbytes: memory[:nbytes].numpy())
    assert batch.buffer.ctypes.data == memory.data_ptr()
    assert batch.table.base is not None
    found = staging.decode(batch, staging.upload(batch, CPU))
    np.testing.assert_array_equal(found.indices.numpy(), np.concatenate([g.indices for g in given]))


SEGMENT = [(0, -1), (0, 500), (1, 1 << 21), (2, 0), (2, 701), (3, 0), (3, 1 << 20)]


@pytest.mark.parametrize(("column", "value"), [*SEGMENT, (4, 1 << 20), (5, 9)])
def test_streams_that_contradict_their_segments_are_refused(column: int, value: int) -> None:
    streams = some_streams()
    segments = streams.segments.copy()
    segments[1, column] = value
    refused(streams, segments=segments)


@pytest.mark.parametrize("name", ["gaps", "sign", "exception", "magnitude", "planes"])
def test_streams_of_another_length_are_refused(name: str) -> None:
    streams = some_streams()
    found: Any = getattr(streams, name)
    one = np.zeros(1, np.uint8)
    if isinstance(found, list):
        refused(streams, **{name: [np.append(plane, one) for plane in found]})
        refused(streams, **{name: []})
    else:
        refused(streams, **{name: np.append(found, one)})
        refused(streams, **{name: found[:-1]})


@pytest.mark.parametrize("bit", [-1, 8])
def test_a_first_bit_outside_its_byte_is_refused(bit: int) -> None:
    refused(some_streams(), bit=bit)


def some_streams() -> TensorStreams:
    (given,) = scene((900,), 0.3, 0.5)
    return streams_of(given, STEPS, 700, 0)


def refused(streams: TensorStreams, **fields: Any) -> None:
    with pytest.raises(MalformedError, match="segments contradict"):
        pack(STEPS, [replace(streams, **fields)])


@pytest.mark.parametrize(
    ("device", "at", "dims", "why"),
    [
        ("cpu", -1, [(4, 1, 1)], "placement"),
        ("cpu", 5, [(4, 1, 1)], "placement"),
        ("cpu", 0, [(2, 1, 1), (2, 4, 2)], "placement"),
        ("cpu", 0, [(0, 1, 1)], "placement"),
        ("meta", 0, [(4, 1, 1)], "meta"),
    ],
)
def test_a_box_outside_its_storage_or_on_another_device_is_refused(
    device: str, at: int, dims: list[tuple[int, int, int]], why: str
) -> None:
    live = torch.zeros(8, dtype=torch.int16, device=device)
    with pytest.raises(ValueError, match=why):
        PlacementTable.build([LivePlacement(0, 0, dims, live, at)], [(1, 2)], CPU)


def test_memory_for_a_device_holds_a_batch() -> None:
    memory = staging.allocator(CPU)(24)
    assert memory.view(np.int64).shape == (3,)
    assert memory.ctypes.data % 8 == 0


def test_placements_of_another_width_are_refused() -> None:
    live = torch.zeros(40, dtype=torch.int32)
    table = PlacementTable.build([LivePlacement(0, 0, [(40, 1, 1)], live)], [(1, 2)], CPU)
    batch = batch_of(scene((40,), 0.5, 0.0), STEPS)
    changes = staging.decode(batch, staging.upload(batch, CPU))
    with pytest.raises(ValueError, match="another width"):
        staging.stage(changes, table, ["w"])


def test_a_span_begins_at_a_block_and_ends_where_a_batch_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[list[tuple[int, int]]] = []

    def flush(lane: Lane) -> None:
        batches.append([(span.start, span.numel) for span in lane._open])
        lane.drop()

    monkeypatch.setattr(device_diff, "BATCH_NBYTES", 3 * 2 * BLOCK)
    monkeypatch.setattr(Lane, "flush", flush)
    lane = Lane(LaneKind.of(torch.int16, torch.int16, resident=False), CopyStream(CPU))
    for numel in (BLOCK - 1, 3 * BLOCK + 5, 0, 1):
        live = torch.zeros(numel, dtype=torch.int16)
        lane.add(Compared("w", live, 0, live, torch.int16, resident=False))
    lane.flush()
    assert batches == [[(0, BLOCK - 1), (0, 2 * BLOCK)], [(2 * BLOCK, BLOCK + 5), (0, 1)], []]


def test_a_snapshot_that_was_replaced_between_diffs_is_compared() -> None:
    diff = DeviceDiff(CPU)
    for seed_of_size in (3, 90):
        weights = Weights("cpu", (seed_of_size,) * 40, resident=False)
        weights.add_to(diff)
        weights.check(settle(diff))


@pytest.mark.parametrize("code", [0, 2])
def test_memory_is_pinned_until_its_tensor_goes(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    class Runtime:
        def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802 - as CUDA has it
            calls.append(arguments)
            return code

        def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
            calls.append(address)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    tensor = torch.zeros(8, dtype=torch.int16)
    address = tensor.data_ptr()
    assert pinned.pin_(tensor) == (code == 0)
    del tensor
    assert calls == [(address, 16, pinned.PORTABLE), *([address] if code == 0 else [])]
    assert ("CUDA error 2" in caplog.text) == (code == 2)


COMPUTE = """
import logging, os, resource, sys
from pathlib import Path
disk, cache = Path(sys.argv[1]), sys.argv[2]
os.environ["NUMBA_CACHE_DIR"] = cache
if not disk.is_mount():  # nobody may mount here: files can at least be limited
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
else:
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "other").write_bytes(bytes(free - 8192))
logging.basicConfig(level=logging.WARNING, format="%(message)s")
import numpy as np
from deltachain.kernels import numba_kernels
from tests.contract import reference
bits, key = np.arange(999, dtype=np.uint16), (1, 2)
assert numba_kernels.digest(key, bits) == reference.digest(key, bits)
assert list(numba_kernels.gather(bits, np.array([3, 5]))) == [3, 5]
"""


@pytest.mark.full
def test_kernels_compute_where_nothing_can_be_kept(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    done = run_on_small_disk("tmpfs", disk, 1 << 20, COMPUTE, disk, disk / "cache")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiled kernels are not kept") == 1, done.stderr


@pytest.mark.full
def test_the_first_compilation_on_a_machine_is_told(tmp_path: Path) -> None:
    code = "from deltachain.cli.console import show_warnings\nshow_warnings()\n"
    code += "import numpy as np\nfrom deltachain.kernels import numba_kernels\n"
    code += "numba_kernels.gather(np.arange(9, dtype=np.uint16), np.array([3, 5]))"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", code]
    for told in (1, 0):
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        assert done.stderr.count("compiling kernels") == told


TOGETHER = """
import os, sys, time
from pathlib import Path
import numpy as np
from numba.core import event
from deltachain.kernels import numba_kernels
bits = np.arange(9, dtype=np.uint16)
Path(sys.argv[1]).touch()
while not Path("go").exists():
    time.sleep(0.001)
with event.install_recorder("numba:compile") as compiled:
    assert list(numba_kernels.gather(bits, np.array([3, 5]))) == [3, 5]
print(len(compiled.buffer))
"""


@pytest.mark.full
@pytest.mark.parametrize("locks", [True, False])
def test_processes_that_start_together_compile_a_kernel_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    cache = tmp_path / "cache"
    (cache if locks else cache / "kernels.lock").mkdir(parents=True)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(cache))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(number)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    while not all((tmp_path / str(number)).exists() for number in range(2)):
        assert all(process.poll() is None for process in started)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    counts = [int(process.communicate(timeout=60)[0]) for process in started]
    assert max(counts) > 0
    assert min(counts) == 0 or not locks


@pytest.mark.parametrize("cores", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, threaded.LEAST, 2 * threaded.LEAST, 3 * threaded.LEAST + 5])
def test_copies_and_digests_are_those_of_one_thread(
    size: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    rng = np.random.default_rng(size)
    for dtype in (BITS_DTYPES[1], BITS_DTYPES[2]):
        bits = rng.integers(0, 256, size, dtype)
        copied = threaded.copy(bits)
        np.testing.assert_array_equal(copied, bits)
        assert copied.dtype == bits.dtype
        assert not np.shares_memory(copied, bits)
        key = (3, 1 << 63)
        assert threaded.digest(key, bits, 77) == reference.digest(key, bits, 77)


@pytest.mark.parametrize("check", [*CHECKS, *BATCH_CHECKS], ids=lambda check: check.__name__)
def test_kernels_in_numba_keep_the_contract(check: Callable[[Any], None]) -> None:
    kernels: Any = numba_kernels
    check(kernels)


@pytest.mark.parametrize("check", LIVE_CHECKS, ids=lambda check: check.__name__)
def test_torch_operations_keep_the_contract(check: Callable[[Any], None]) -> None:
    check(DeviceArm("cpu"))


@pytest.mark.parametrize("check", HOST_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kernels", [reference, numba_kernels])
def test_kernels_of_the_host_keep_the_contract(
    kernels: Any, check: Callable[[HostArm], None]
) -> None:
    check(kernels)


LIVE: "dict[str, LiveBits]" = {
    "host": np.empty(0, np.uint16),
    "device": torch.empty(0, dtype=torch.int16),
}


@pytest.mark.parametrize("check", BIT_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("where", LIVE)
def test_kernels_of_live_bits_do_what_numpy_does(
    where: str, check: "Callable[[LiveBits], None]"
) -> None:
    check(LIVE[where])


def test_live_bits_choose_the_fastest_kernels() -> None:
    chosen: list[Any] = [kernels_for(bits) for bits in LIVE.values()]
    assert chosen == [host, torch_kernels]
    assert not same_bits(LIVE["host"], LIVE["device"])
    assert host.diff_ is numba_kernels.diff_
    assert not compares_on(CPU, torch.bfloat16, torch.bfloat16)


def test_a_device_whose_programs_do_not_run_leaves_changes_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(staging, "find_spec", lambda _: True)
    staging.decodes_on.cache_clear()
    assert not staging.decodes_on(torch.device("cuda", 3))  # torch for CPUs has none
    assert "cuda:3 are decoded on the host" in caplog.text
    staging.decodes_on.cache_clear()


@pytest.mark.parametrize("where", ["cuda", "cuda:0", "cuda:1"])
def test_a_table_may_be_for_a_device_without_an_index(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_row", lambda *_: [0] * 9)  # fake tensors have no address
    with FakeTensorMode(allow_non_fake_inputs=True):
        live = LivePlacement(0, 0, [(5, 1, 1)], torch.zeros(5, dtype=torch.int16, device="cuda"))
        with nullcontext() if where != "cuda:1" else pytest.raises(ValueError, match="cuda:1"):
            table = PlacementTable.build([live], [(1, 2)], torch.device(where))
            assert table.rows.device == torch.device("cuda:0")


def test_threads_work_on_the_streams_of_their_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextmanager
    def stream(one: str) -> Iterator[None]:
        entered.append((one, get_ident()))
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda one: f"{get_ident()} on {one}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    assert torch_kernels.on_streams_of_caller(abs, [CPU]) is abs
    work = torch_kernels.on_streams_of_caller(abs, [CPU, torch.device("cuda", 1)])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work, -3).result() == 3
        other = pool.submit(get_ident).result()
    assert entered == [(f"{get_ident()} on cuda:1", other)]


@pytest.mark.parametrize("kind", ["step", "absolute", "mixed"])
@pytest.mark.parametrize("where", LIVE)
def test_a_move_is_what_the_delta_and_the_reference_say(where: str, kind: str) -> None:
    live, key, rng = LIVE[where], (3, 5), np.random.default_rng(9)
    kernels = kernels_for(live)
    for dtype in BITS_DTYPES.values():
        bits, values = rng.integers(0, 256, 90, dtype), rng.integers(1, 256, 20, dtype)
        indices = np.sort(rng.choice(90, 20, replace=False)) + 1000
        masks = {"step": np.array(False), "absolute": np.array(True), "mixed": values % 2 == 0}
        mask = masks[kind]
        old = bits[indices - 1000]
        new = np.where(mask, values, old + values)
        weights = kernels.copy(kernels.receive(bits, live))
        at, given, positions = (
            kernels.receive(array, live) for array in (indices, values, indices - 1000)
        )
        absolute = kernels.receive(mask, live) if mask.ndim else mask
        moved = move_at(weights, positions, key, at, given, absolute)
        assert moved.added == reference.digest_at(key, indices, new)
        assert moved.removed == reference.digest_at(key, indices, old)
        write_(weights, positions, moved.new)
        bits[indices - 1000] = new
        np.testing.assert_array_equal(host.receive(weights, bits), bits)
        write_(weights, positions, moved.old)
        bits[indices - 1000] = old
        np.testing.assert_array_equal(host.receive(weights, bits), bits)


def test_a_move_of_a_whole_tensor_changes_the_digest_by_what_it_says() -> None:
    spec = TensorSpec("w", "BF16", (9,))
    old, indices = np.arange(9, dtype=np.uint16), np.array([2, 5])
    steps = np.array([7, 65535], np.uint16)
    moved = move(old, TensorDelta(spec=spec, indices=indices, values=steps))
    assert moved.change == digest_change(spec, indices, old[indices], old[indices] + steps)
    whole = move(old, TensorDelta.dense(spec, old + steps[0]))
    assert (whole.new == old + steps[0]).all()
    assert whole.change == whole.added, "what it replaces need not be known"


def test_encoders_equal_the_reference() -> None:
    for snapshot, current in pairs():
        indices = np.flatnonzero(snapshot != current)
        for width in (1, 2):
            expected = reference.encode_gaps(indices, width)
            np.testing.assert_array_equal(expected, numba_kernels.encode_gaps(indices, width))
        steps = (current - snapshot)[indices]
        for one, other in zip(
            reference.split_steps(steps), numba_kernels.split_steps(steps), strict=True
        ):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(reference.join_steps(numba_kernels.split_steps(steps)), steps)

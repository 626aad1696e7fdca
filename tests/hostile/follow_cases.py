"""Lets real followers read hostile objects, in a process with little memory.

``python -m tests.hostile.follow_cases`` prints a JSON object for each case and kind of target, and
exits with 0 after the last. With ``signed``, the chains are signed, and the followers trust only
their key; the kinds are then those of the attacker. The caller checks the objects.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final

import torch
from torch import Tensor

from deltachain.chain.chain import Chain
from deltachain.checkpoint import HELD_FILE, WEIGHTS_FILE
from deltachain.store import MemoryStore
from deltachain.subscribe import FolderTarget, HeldVersion, Subscriber
from deltachain.subscribe.targets.folder import write_assets
from deltachain.subscribe.targets.tensors import TensorTarget
from deltachain.torch_names import WIRE_NAMES
from deltachain.types import TensorSpec
from tests.format.freeze import KEY, OWNER
from tests.hostile.corpus import CORPUS
from tests.hostile.scene import SCENES, Case, Scene

MEMORY: Final = 1 << 30
"""Bytes of address space a case may take: 16 times the largest directory of a part."""

DEADLINE_S: Final = 20
"""After that long a case is stopped."""

KINDS: Final = ("dict", "folder")
CONTROL: Final = "control"
STRIPS: Final = "strips signatures"
KEEPS: Final = "keeps signatures"
SIGNED_KINDS: Final = (STRIPS, KEEPS)

MEMORY_DISK: Final = Path("/dev/shm")  # noqa: S108
"""Where followers write, if it is there: nothing waits for a disk."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A target, and ways to read past it the bits it has and the version it remembers."""

    target: TensorTarget | FolderTarget
    bits: Callable[[], bytes]
    remembered: Callable[[], int | None]


def replica_of(kind: str, spec: TensorSpec, folder: Path) -> Replica:
    if kind == "folder":
        file, held = folder / WEIGHTS_FILE, folder / HELD_FILE
        return Replica(
            FolderTarget(folder),
            lambda: file.read_bytes()[-spec.nbytes :],
            lambda: json.loads(held.read_bytes())["held"]["version"],
        )
    (dtype,) = (t for t, name in WIRE_NAMES.items() if name == spec.dtype)
    tensor: Tensor = torch.zeros(spec.shape, dtype=dtype)
    raw = tensor.view(-1).view(torch.uint8).numpy()
    raw[:] = 0x55  # bits of no version
    target = TensorTarget({spec.name: tensor})
    return Replica(target, raw.tobytes, lambda: version_of(target.held()))


def follow_case(case: Case | None, scene: Scene, kind: str, folder: Path) -> dict[str, object]:
    replica = replica_of(kind, scene.spec, folder)
    follower = Subscriber(scene.store.url, replica.target, store=scene.store)
    follower.update(0)
    before = replica.bits()
    if case is not None:
        case.act(scene)
    if case is not None and case.opens:
        follower.close()
        if kind == "folder":
            replica = replica_of(kind, scene.spec, folder)
        follower = Subscriber(scene.store.url, replica.target, store=scene.store)
    objects, files = scene.objects(), names(folder)
    takes = take_assets if case is not None and case.assets else take_version
    start = time.perf_counter()
    error = caught(takes, follower, scene.store, folder)
    seconds = time.perf_counter() - start
    now = replica.bits()
    return {
        "id": f"{CONTROL}: {scene.name}" if case is None else case.id,
        "error": "" if error is None else type(error).__name__,
        "message": "" if error is None else str(error)[:500],
        "key": level_of(getattr(error, "key", ""), scene),
        "reached": now == scene.truth.tobytes(),
        "untouched": now == before and names(folder) == files,
        "held": version_of(follower.held),
        "remembered": replica.remembered(),
        "stored": scene.objects() == objects,
        "seconds": seconds,
    }


def take_version(follower: Subscriber, _store: MemoryStore, _folder: Path) -> None:
    follower.update()


def take_assets(_follower: Subscriber, store: MemoryStore, folder: Path) -> None:
    write_assets(Chain.open(store), folder)


def caught(
    take: Callable[[Subscriber, MemoryStore, Path], None],
    follower: Subscriber,
    store: MemoryStore,
    folder: Path,
) -> BaseException | None:
    try:
        with deadline(), little_memory():
            take(follower, store, folder)
    except BaseException as exc:  # noqa: BLE001
        return exc
    return None


@contextmanager
def deadline() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def level_of(key: str, scene: Scene) -> str:
    return next((level for level, place in scene.keys.items() if place == key), key)


def names(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def version_of(held: HeldVersion | None) -> int | None:
    return None if held is None else held.version


@contextmanager
def little_memory() -> Iterator[None]:
    """Nothing may take more address space than the process has now, and ``MEMORY``."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> None:
    is_signed = sys.argv[1:] == ["signed"]
    if is_signed:
        os.environ["DELTACHAIN_TRUSTED_KEYS"] = str(KEY.public)
    disk = MEMORY_DISK if MEMORY_DISK.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="deltachain-hostile-", dir=disk) as scratch:
        number = 0
        cases = [(None, scene) for scene in SCENES] + [(case, case.scene) for case in CORPUS]
        for case, scene in cases:
            for kind in SIGNED_KINDS if is_signed else KINDS:
                folder = Path(scratch, str(number))
                folder.mkdir()
                number += 1
                sound = scene_of(scene, kind).fresh()
                outcome = follow_case(case, sound, target_of(kind), folder)
                sys.stdout.write(json.dumps(outcome | {"kind": kind}) + "\n")
                sys.stdout.flush()


@cache
def scene_of(name: str, kind: str) -> Scene:
    if kind in KINDS:
        return Scene(name)
    return Scene(name, trust=OWNER, keeps=kind == KEEPS)


def target_of(kind: str) -> str:
    return kind if kind in KINDS else KINDS[0]


if __name__ == "__main__":
    main()

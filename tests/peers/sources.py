"""``python -m tests.peers.sources``: sources of systems that are no package, at pinned commits.

``PEERS`` names the folder, by default ``.peers``; sources in it are not fetched again.
"""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

FOLDER: Final = Path(os.environ.get("PEERS", Path(__file__).resolve().parents[2] / ".peers"))
UPDATE: Final = "slime/backends/megatron_utils/update_weight"
PULL: Final = "docker/patch/latest/sglang-pull_weights.patch"


@dataclass(frozen=True, slots=True)
class Pin:
    repository: str
    commit: str
    paths: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.repository.rpartition('/')[2]}-{self.commit[:9]}"

    def path(self, *parts: str) -> Path:
        found = self.folder.joinpath(*parts)
        if not found.exists():
            raise FileNotFoundError(f"{found} is missing: make test-peers fetches it from GitHub")
        return found


def _trl(commit: str) -> Pin:
    return Pin("https://github.com/huggingface/trl", commit, ("trl/experimental/async_grpo",))


TRL: Final = {  # branches delta-weight-sync, -v2 and -v3
    1: _trl("d6504b7e39e0cece60b1034db7cad05b4d69990f"),
    2: _trl("3253247dc417cca5be0ed8675fed17b54af7ad68"),
    3: _trl("aa9adc3358dcc295f2d448807fd83431a4ac353c"),
}
SLIME: Final = Pin(
    "https://github.com/THUDM/slime",
    "624b824a898ab0ec1fcb4d373004c7f3852bf515",
    ("slime/utils", UPDATE, PULL),
)
VLLM: Final = Pin("https://github.com/vllm-project/vllm", "v0.32.0", ("examples/rl",))


def fetch(pin: Pin) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(part), *words], check=True)  # noqa: S607

    part = pin.folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    git("init", "-q")
    git("fetch", "-q", "--depth", "1", pin.repository, pin.commit)
    git("checkout", "-q", "FETCH_HEAD", "--", *pin.paths)
    if PULL in pin.paths:  # of its SGLang: one new file
        git("apply", "--include=*/local_checkpoint.py", PULL)
    shutil.rmtree(part / ".git")
    part.rename(pin.folder)


def _package(name: str, *path: Path, **fields: object) -> str:
    """Make a package without its ``__init__.py``, which would import all of its system."""
    made = ModuleType(name)
    vars(made).update(fields, __path__=list(map(str, path)))
    sys.modules[name] = made
    return name


def trl(draft: int) -> Any:
    """TRL's module, with a folder in place of a bucket; vLLM 0.32 has no ``SparseWeightPatch``."""
    from vllm.distributed.weight_transfer import base  # noqa: PLC0415

    vars(base).setdefault("SparseWeightPatch", _Fields)
    vars(base)["WeightTransferUpdateInfo"].update_kind = "sparse_flat"
    name = _package(f"trl_draft_{draft}", TRL[draft].path(*TRL[draft].paths))
    found = importlib.import_module(f"{name}.delta_engine")
    vars(found).update(download_bucket_files=_download, batch_bucket_files=_upload)
    return found


class _Fields:
    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)


def trl_engine(draft: int) -> Any:
    found = trl(draft)
    return vars(found).get("DeltaWeightTransferEngine") or found.HFBucketWeightTransferEngine


def _download(bucket: str, files: Sequence[tuple[str, str]]) -> None:
    for key, place in files:
        shutil.copy(Path(bucket, key), place)


def _upload(bucket: str, add: Sequence[tuple[str | bytes, str]]) -> None:
    for data, key in add:
        place = Path(bucket, key)
        place.parent.mkdir(parents=True, exist_ok=True)
        whole = data if isinstance(data, bytes) else Path(data).read_bytes()
        place.with_suffix(".part").write_bytes(whole)
        place.with_suffix(".part").rename(place)


def slime_receiver() -> Any:
    name = _package("slime_sglang", SLIME.path("python/sglang/srt/weight_sync"))
    return importlib.import_module(f"{name}.local_checkpoint")


def slime_trainer() -> Any:
    """The trainer's updater in a process group; Megatron, which gathers for it, is not there."""

    class Base:
        def __init__(self, args: Any, *_: object, **__: object) -> None:
            self.args, self.weight_version = args, 0

    _package("megatron")
    _package("megatron.core", mpu=None)
    _package("slime", SLIME.path("slime"))
    importlib.import_module("slime.utils.distributed_utils").init_gloo_group()
    name = _package("slime_update", SLIME.path(UPDATE))
    _package(f"{name}.update_weight_from_distributed", UpdateWeightFromDistributed=Base)
    return importlib.import_module(f"{name}.update_weight_from_disk_delta")


def pins() -> Iterator[Pin]:
    yield from (*TRL.values(), SLIME, VLLM)


if __name__ == "__main__":
    for missing in (one for one in pins() if not one.folder.exists()):
        sys.stdout.write(f"{missing.repository} at {missing.commit}\n")
        fetch(missing)

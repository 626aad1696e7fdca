"""Receivers and trainers of other systems, by their own code; a version is a state of bf16 tensors.

A receiver takes exported versions and tells the bytes that it holds. A trainer writes versions.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltachain.bridges.export import Exported
from tests.peers import sources
from tests.unit.bridges.test_bridges import Bytes, Run

State: TypeAlias = Mapping[str, Tensor]


def bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()


def read(files: Iterable[Path]) -> Bytes:
    return {name: bytes_of(one) for file in files for name, one in load_file(file).items()}


class Receiver(Protocol):
    def take(self, done: Exported) -> None: ...

    def held(self) -> Bytes: ...


class TRLReceiver:
    """The engine of a draft, which asks a vLLM of then for fewer methods than one of today."""

    def __init__(self, draft: int, run: Run) -> None:
        kind, self.out, self.weights = sources.trl_engine(draft), str(run.out), dict[str, Tensor]()
        absent = dict.fromkeys(kind.__abstractmethods__, lambda *_: None)
        whole = type("Engine", (kind,), {**absent, "__init__": lambda _: None})
        self.engine: Any = whole()
        self.engine._bf16_snapshot = None  # as its __init__

    def take(self, done: Exported) -> None:
        where = SimpleNamespace(repo_id=self.out, filename=done.key)
        if done.full or not hasattr(self.engine, "receive_sparse_weights"):
            self.engine.receive_weights(where, self._load)
        else:
            self.engine.receive_sparse_weights(where, self._patch)

    def _load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in pairs}

    def _patch(self, patches: Iterable[Any]) -> None:
        for one in patches:
            self.weights[one.name].view(-1)[one.indices.long()] = one.values

    def held(self) -> Bytes:
        return {name: bytes_of(one) for name, one in self.weights.items()}


class SlimeReceiver:
    def __init__(self, run: Run, local: Path) -> None:
        self.out, self.local, self.pull = run.out, local, sources.slime_receiver().pull

    def take(self, done: Exported) -> None:
        base = str(self.out / "weight_v000000")
        self.pull(str(self.local), base, str(self.out), done.number)

    def held(self) -> Bytes:
        return read(self.local.glob("*.safetensors"))


class SkyRLReceiver:
    def __init__(self, run: Run, local: Path) -> None:
        from skyrl.backends.skyrl_train.weight_sync.delta.checkpoint import (  # noqa: PLC0415
            LocalCheckpointStore,
        )

        self.out, self.store = str(run.out), LocalCheckpointStore(f"{run.out}/base", str(local))

    def take(self, done: Exported) -> None:
        self.store.fetch(done.number, self.out)

    def held(self) -> Bytes:
        return {name: bytes_of(tensor) for name, tensor in self.store.iter_tensors()}


class ModelExpressReceiver:
    """Reads from S3; what its catalogue would say of a version is said here."""

    def __init__(self, run: Run, local: Path) -> None:
        from modelexpress_rl import ObjectStorageGeneratorConfig, ObjectStorageType  # noqa: PLC0415
        from modelexpress_rl.inference.methods import CanonicalDeltaUpdateMethod  # noqa: PLC0415

        self.url, self.path = run.files.url, local / "seed"
        self.path.mkdir(parents=True)
        save_file(dict(run.tensors()), self.path / "model.safetensors")  # replaced by version 0
        config = ObjectStorageGeneratorConfig(
            storage_type=ObjectStorageType.S3,
            initial_base_version_id="seed",
            seed_checkpoint_path=self.path,
            refit_checkpoint_dir=local / "cache",
        )
        self.method = CanonicalDeltaUpdateMethod(model_name="model", config=config)

    def take(self, done: Exported) -> None:
        import modelexpress_rl as mx  # noqa: PLC0415
        from modelexpress_rl.inference.plan import ObjectStorageUpdateSource  # noqa: PLC0415

        kind = mx.WeightPayloadFormat
        version = mx.WeightVersion(
            version_id=f"v{done.number}",
            model_name="model",
            payload_format=kind.FULL_HF_CHECKPOINT if done.full else kind.XOR_DELTA,
            base_version_id=None if done.full else f"v{done.number - 1}",
            object_storage=mx.ObjectStorageSource(
                mx.ObjectStorageType.S3, f"{self.url}/{done.key}"
            ),
            expected_source_slots=(),
            layout_signature="",
            state=mx.WeightVersionState.READY,
            created_at_unix_ms=0,
        )
        source = ObjectStorageUpdateSource(version.object_storage, version.payload_format)
        prepared: Any = self.method.prepare(version=version, source=source)
        self.path = prepared.checkpoint.path
        self.method.activate(prepared)
        self.method.release(prepared)

    def held(self) -> Bytes:
        return read(self.path.glob("*.safetensors"))


class CheckpointReceiver:
    """``from_pretrained`` and the like: safetensors' own reader."""

    def __init__(self, run: Run) -> None:
        self.out, self.key = run.out, ""

    def take(self, done: Exported) -> None:
        self.key = done.key

    def held(self) -> Bytes:
        return read((self.out / self.key).parent.glob("*.safetensors"))


def receiver(system: str, run: Run, local: Path) -> Receiver:
    if system.startswith("trl"):
        return TRLReceiver(int(system[-1]), run)
    if system == "checkpoint":
        return CheckpointReceiver(run)
    kinds: dict[str, Any] = {
        "slime": SlimeReceiver,
        "skyrl": SkyRLReceiver,
        "modelexpress": ModelExpressReceiver,
    }
    found: Receiver = kinds[system](run, local)
    return found


class Trainer(Protocol):
    @property
    def base(self) -> Path | None:
        """Checkpoint that the first changes are of, where it is not in the files."""

    def write(self, number: int, now: State) -> None: ...


class TRLTrainer:
    base = None

    def __init__(self, out: str, start: State, draft: int, **settings: object) -> None:
        self.engine, self.settings, self.out = sources.trl_engine(draft), settings, out
        self.before = start
        self._upload("anchors", 0, ((name, one, None) for name, one in start.items()))

    def _upload(self, folder: str, number: int, items: Iterator[tuple[str, Tensor, Any]]) -> None:
        key = f"{folder}/step_{number:06d}.safetensors"
        self.engine.upload(items, self.out, key, model_version=number, **self.settings)

    def write(self, number: int, now: State) -> None:
        masks = {name: as_bits(one) != as_bits(self.before[name]) for name, one in now.items()}
        changed = ((name, one, masks[name]) for name, one in now.items() if masks[name].any())
        self._upload("deltas", number, changed)
        self.before = now


def as_bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


class SlimeTrainer:
    def __init__(self, out: str, start: State, base: Path, encoding: str, checksum: str) -> None:
        self.base, self.now, module = base, start, sources.slime_trainer()
        base.mkdir()
        save_file(dict(start), base / "model.safetensors")
        vars(module).update(ray=SimpleNamespace(get=list))  # of no engine
        args = Namespace(
            update_weight_disk_dir=out,
            update_weight_delta_encoding=encoding,
            update_weight_delta_checksum=checksum,
            custom_update_weight_post_write_path=None,
            hf_checkpoint=str(base),
        )
        made = module.UpdateWeightFromDiskDelta(
            args, [], dict, model_name="", quantization_config=None
        )
        made.rollout_engines, made._is_pp_src_rank = [], True  # as on one rank
        made._iter_hf_tensors = lambda: iter(self.now.items())
        made._record_metrics = lambda: None
        self.updater = made
        made.update_weights()  # the first call reads the base

    def write(self, number: int, now: State) -> None:
        self.now = now
        self.updater.update_weights()
        assert self.updater.weight_version == number


class SkyRLTrainer:
    base = None

    def __init__(self, out: str, start: State, staging: Path) -> None:
        from skyrl.backends.skyrl_train.weight_sync.delta.checkpoint import (  # noqa: PLC0415
            DeltaCheckpointPublisher,
        )

        base = Path(out, "base")
        base.mkdir(parents=True)
        save_file(dict(start), base / "model.safetensors")
        self.publisher = DeltaCheckpointPublisher(str(base), out, str(staging))

    def write(self, number: int, now: State) -> None:
        done = self.publisher.publish(self.publisher.create_delta_files(iter(now.items())))
        assert done["version"] == number


class ModelExpressTrainer:
    """Writes to S3; its catalogue is what ``write`` asks it for."""

    base = None

    def __init__(self, out: str, start: State) -> None:
        from modelexpress_rl import refit_pb2  # noqa: PLC0415
        from modelexpress_rl.s3 import S3Client  # noqa: PLC0415
        from modelexpress_rl.train.methods import CanonicalDeltaPublicationMethod  # noqa: PLC0415

        self.out, self.pb = out, refit_pb2
        self.method = CanonicalDeltaPublicationMethod(
            config=SimpleNamespace(initial_base_version_id="none", uri_prefix=out),
            model_name="model",
            service=lambda: SimpleNamespace(GetWeightVersion=self._version),
            rpc_timeout_seconds=1.0,
            process_group=None,
            read_seed_tensor=lambda name: bytes_of(start[name]),
            s3=S3Client(),
        )
        self.write(0, start)

    def _version(self, request: Any, timeout: float) -> Any:
        del timeout
        number = int(request.uid.removeprefix("v"))
        full = number == 0
        changes = {} if full else {"base_version_id": f"v{number - 1}"}
        name = "FULL_HF_CHECKPOINT" if full else "XOR_DELTA"
        version = self.pb.WeightVersion(
            uid=request.uid,
            model_name="model",
            payload_format=getattr(self.pb, f"WEIGHT_PAYLOAD_FORMAT_{name}"),
            object_storage=self.pb.ObjectStorageSource(
                uri=f"{self.out}/{request.uid}/model.safetensors.index.json",
                storage_type=self.pb.OBJECT_STORAGE_TYPE_S3,
            ),
            **changes,
        )
        return self.pb.GetWeightVersionResponse(version=version)

    def write(self, number: int, now: State) -> None:
        from modelexpress_rl import WeightVersionRef  # noqa: PLC0415

        version = WeightVersionRef(f"v{number}")
        staged = self.method.stage(version=version, hf_tensor_iter=[list(now.items())])
        self.method.publish(version=version, staged=staged)


class CheckpointTrainer:
    base = None

    def __init__(self, out: str, start: State) -> None:
        self.out = Path(out)
        self.write(0, start)

    def write(self, number: int, now: State) -> None:
        made = self.out / ".part"
        made.mkdir(parents=True)
        save_file(dict(now), made / "model.safetensors")
        made.rename(self.out / f"checkpoint-{number}")


def trainer(system: str, out: str, start: State, local: Path) -> Trainer:
    name, *rest = system.split()
    if name.startswith("trl"):
        return TRLTrainer(out, start, int(name[-1]), **({"encoding": "raw"} if rest else {}))
    if name == "slime":
        return SlimeTrainer(out, start, local, *rest)
    if name == "skyrl":
        return SkyRLTrainer(out, start, local)
    return (ModelExpressTrainer if name == "modelexpress" else CheckpointTrainer)(out, start)

"""Receivers and trainers of other systems, by their own code; a version has bf16 tensors."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltachain.bridges.export import Exported
from tests.peers import sources
from tests.unit.bridges.test_bridges import INDEX, Bytes, Run

State: TypeAlias = Mapping[str, Tensor]
Write: TypeAlias = Callable[[int, State], object]


def bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()


def read(folder: Path) -> Bytes:
    files = map(load_file, folder.glob("*.safetensors"))
    return {name: bytes_of(one) for file in files for name, one in file.items()}


def save(folder: Path, state: State) -> None:
    folder.mkdir(parents=True)
    save_file(dict(state), folder / "model.safetensors")


@dataclass(frozen=True)
class Receiver:
    take: Callable[[Exported], object]
    held: Callable[[], Bytes]


def receiver(system: str, run: Run, local: Path) -> Receiver:
    """Return a receiver of the exported versions of a run, with a folder of its own."""
    if system.startswith("trl"):
        return _trl_receiver(int(system[-1]), str(run.out))
    if system == "slime":
        pull, base = sources.slime_receiver().pull, str(run.out / "weight_v000000")
        return Receiver(
            lambda done: pull(str(local), base, str(run.out), done.number), lambda: read(local)
        )
    if system == "skyrl":
        from skyrl.backends.skyrl_train.weight_sync.delta import checkpoint  # noqa: PLC0415

        store = checkpoint.LocalCheckpointStore(f"{run.out}/base", str(local))
        return Receiver(
            lambda done: store.fetch(done.number, str(run.out)),
            lambda: {name: bytes_of(tensor) for name, tensor in store.iter_tensors()},
        )
    if system == "modelexpress":
        return _modelexpress_receiver(run, local)
    keys: list[str] = []  # plain checkpoints, by safetensors' own reader
    return Receiver(lambda done: keys.append(done.key), lambda: read((run.out / keys[-1]).parent))


def _trl_receiver(draft: int, out: str) -> Receiver:
    """The engine of a draft, which has fewer methods than a vLLM of today asks for."""
    kind, weights = sources.trl_engine(draft), dict[str, Tensor]()
    absent = dict.fromkeys(kind.__abstractmethods__, lambda *_: None)
    engine: Any = type("Engine", (kind,), {**absent, "__init__": lambda _: None})()
    engine._bf16_snapshot = None  # as its __init__

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        weights.update((name, tensor.clone()) for name, tensor in pairs)

    def patch(patches: Iterable[Any]) -> None:
        for one in patches:
            weights[one.name].view(-1)[one.indices.long()] = one.values

    def take(done: Exported) -> None:
        where = SimpleNamespace(repo_id=out, filename=done.key)
        if done.full or not hasattr(engine, "receive_sparse_weights"):
            engine.receive_weights(where, load)
        else:
            engine.receive_sparse_weights(where, patch)

    return Receiver(take, lambda: {name: bytes_of(one) for name, one in weights.items()})


def _modelexpress_receiver(run: Run, local: Path) -> Receiver:
    """A receiver of versions in S3; what its catalogue would say of one is said here."""
    import modelexpress_rl as mx  # noqa: PLC0415
    from modelexpress_rl.inference.methods import CanonicalDeltaUpdateMethod  # noqa: PLC0415
    from modelexpress_rl.inference.plan import ObjectStorageUpdateSource  # noqa: PLC0415

    save(local / "seed", dict(run.tensors()))  # replaced by version 0
    config = mx.ObjectStorageGeneratorConfig(
        storage_type=mx.ObjectStorageType.S3,
        initial_base_version_id="seed",
        seed_checkpoint_path=local / "seed",
        refit_checkpoint_dir=local / "cache",
    )
    method = CanonicalDeltaUpdateMethod(model_name="model", config=config)
    paths: list[Path] = []

    def take(done: Exported) -> None:
        kind = mx.WeightPayloadFormat
        storage = mx.ObjectStorageSource(mx.ObjectStorageType.S3, f"{run.files.url}/{done.key}")
        version = mx.WeightVersion(
            version_id=f"v{done.number}",
            model_name="model",
            payload_format=kind.FULL_HF_CHECKPOINT if done.full else kind.XOR_DELTA,
            base_version_id=None if done.full else f"v{done.number - 1}",
            object_storage=storage,
            expected_source_slots=(),
            layout_signature="",
            state=mx.WeightVersionState.READY,
            created_at_unix_ms=0,
        )
        source = ObjectStorageUpdateSource(storage, version.payload_format)
        prepared: Any = method.prepare(version=version, source=source)
        paths.append(prepared.checkpoint.path)
        method.activate(prepared)
        method.release(prepared)

    return Receiver(take, lambda: read(paths[-1]))


def trainer(system: str, out: str, start: State, local: Path) -> tuple[Write, Path | None]:
    """Write version 0 of a trainer; return how it writes later ones, and a base that is apart."""
    name, *rest = system.split()
    if name.startswith("trl"):
        settings = {"encoding": rest[0]} if rest else {}
        return trl_trainer(out, start, int(name[-1]), **settings), None
    if name == "slime":
        return _slime_trainer(out, start, local, *rest), local
    if name == "skyrl":
        from skyrl.backends.skyrl_train.weight_sync.delta import checkpoint  # noqa: PLC0415

        save(Path(out, "base"), start)
        publisher = checkpoint.DeltaCheckpointPublisher(f"{out}/base", out, str(local))
        return lambda _, now: publisher.publish(
            publisher.create_delta_files(iter(now.items()))
        ), None
    if name == "modelexpress":
        return _modelexpress_trainer(out, start), None

    def write(number: int, now: State) -> None:
        save(Path(out, ".part"), now)
        Path(out, ".part").rename(Path(out, f"checkpoint-{number}"))

    write(0, start)
    return write, None


def trl_trainer(out: str, start: State, draft: int, **settings: object) -> Write:
    engine, last = sources.trl_engine(draft), [start]

    def upload(folder: str, number: int, items: Iterator[tuple[str, Tensor, Any]]) -> None:
        key = f"{folder}/step_{number:06d}.safetensors"
        engine.upload(items, out, key, model_version=number, **settings)

    def write(number: int, now: State) -> None:
        before = last.pop()
        last.append(now)
        masks = {n: one.view(torch.int16) != before[n].view(torch.int16) for n, one in now.items()}
        upload("deltas", number, ((n, now[n], mask) for n, mask in masks.items() if mask.any()))

    upload("anchors", 0, ((name, one, None) for name, one in start.items()))
    return write


def _slime_trainer(out: str, start: State, base: Path, encoding: str, checksum: str) -> Write:
    save(base, start)
    module, states = sources.slime_trainer(), [start]
    vars(module).update(ray=SimpleNamespace(get=list))  # of no engine
    args = Namespace(
        update_weight_disk_dir=out,
        update_weight_delta_encoding=encoding,
        update_weight_delta_checksum=checksum,
        custom_update_weight_post_write_path=None,
        hf_checkpoint=str(base),
    )
    made = module.UpdateWeightFromDiskDelta(args, [], dict, model_name="", quantization_config=None)
    made.rollout_engines, made._is_pp_src_rank = [], True  # as on one rank
    made._iter_hf_tensors = lambda: iter(states[-1].items())
    made._record_metrics = lambda: None
    made.update_weights()  # the first call reads the base

    def write(_: int, now: State) -> None:
        states.append(now)
        made.update_weights()

    return write


def _modelexpress_trainer(out: str, start: State) -> Write:
    """A trainer that writes to S3; its catalogue is what ``asked`` answers."""
    from modelexpress_rl import WeightVersionRef, refit_pb2  # noqa: PLC0415
    from modelexpress_rl.s3 import S3Client  # noqa: PLC0415
    from modelexpress_rl.train.methods import CanonicalDeltaPublicationMethod  # noqa: PLC0415

    def asked(request: Any, timeout: float) -> Any:
        del timeout
        number = int(request.uid.removeprefix("v"))
        kind = "XOR_DELTA" if number else "FULL_HF_CHECKPOINT"
        version = refit_pb2.WeightVersion(
            uid=request.uid,
            model_name="model",
            payload_format=getattr(refit_pb2, f"WEIGHT_PAYLOAD_FORMAT_{kind}"),
            object_storage=refit_pb2.ObjectStorageSource(
                uri=f"{out}/{request.uid}/{INDEX}", storage_type=refit_pb2.OBJECT_STORAGE_TYPE_S3
            ),
            base_version_id=f"v{number - 1}" if number else None,
        )
        return refit_pb2.GetWeightVersionResponse(version=version)

    method = CanonicalDeltaPublicationMethod(
        config=SimpleNamespace(initial_base_version_id="none", uri_prefix=out),
        model_name="model",
        service=lambda: SimpleNamespace(GetWeightVersion=asked),
        rpc_timeout_seconds=1.0,
        process_group=None,
        read_seed_tensor=lambda name: bytes_of(start[name]),
        s3=S3Client(),
    )

    def write(number: int, now: State) -> None:
        version = WeightVersionRef(f"v{number}")
        staged = method.stage(version=version, hf_tensor_iter=[list(now.items())])
        method.publish(version=version, staged=staged)

    write(0, start)
    return write

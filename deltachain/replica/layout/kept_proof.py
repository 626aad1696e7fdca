"""Layouts that were proven at an earlier start of the same engine, kept in files.

A file is believed only for an equal engine: its fingerprint covers the packages, the model's
modules with their options, the checkpoint's tensors and the machine's kernels. Then the loader is
recorded anew, each tensor in place is read back, and one layer of each kind is tried again. If
anything differs, the layout is discovered from nothing.
"""

import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import torch
from blake3 import blake3

from deltachain.format.documents import Struct, decode
from deltachain.format.keys import digest_key, object_digest
from deltachain.kernels import host
from deltachain.replica.engine import EngineModel
from deltachain.replica.spool import make_folder
from deltachain.threads import Pool, cores
from deltachain.types import Bits

from .classes import ON_HOST, Form, TensorClass
from .discover import Layout, Recorded, discover, forms, recorded
from .findings import (
    Findings,
    all_layers,
    components,
    from_recording,
    links_of,
    options_of,
    some_of_each,
)
from .in_place import again, verify_in_place
from .loaded_checkpoint import LoadedCheckpoint
from .model_state import LoadGroup, LoadMethod, ModelState, restore_outputs
from .module_members import digest_of, fingerprint, undisturbed
from .reloads import Trial

logger = logging.getLogger(__name__)

KEPT: Final = 16  # number of proofs that a folder keeps; the oldest are removed

LARGEST: Final = 256 << 20  # bytes of the largest file that is read

OPTIONS: Final = ("VLLM_", "SGLANG_", "SGL_", "TORCH")
"""First parts of the names of environment variables that are options of an engine."""

VOLATILE: Final = (
    "PORT",
    "HOST",
    "KEY",
    "TOKEN",
    "PATH",
    "DIR",
    "ROOT",
    "LOG",
    "ADDR",
    "ID",
    "UUID",
    "NAME",
)
"""First parts of words in the names of those that differ from start to start."""


class _Tensor(Struct, frozen=True, kw_only=True):
    kind: TensorClass
    reason: str
    windows: tuple[Form, ...]
    readable: bool
    idle: bool


class _Group(Struct, frozen=True, kw_only=True):
    method: LoadMethod
    names: tuple[str, ...]
    layers: tuple[str, ...]
    comparable: bool


class Proof(Struct, frozen=True, kw_only=True):
    """A layout as one file has it."""

    fingerprint: str
    tensors: dict[str, _Tensor]
    groups: tuple[_Group, ...]
    loaded: str = ""  # digest of what the engine held once its loads were proven


class FoundLayout(NamedTuple):
    layout: Layout
    proof: Proof | None = None
    is_kept: bool = False


def find_layout(model: EngineModel, source: LoadedCheckpoint, folder: Path | None) -> FoundLayout:
    """Return the layout of a rank that holds the checkpoint it loaded, and whether it is kept.

    It is a kept one of ``folder``, proven again, or discovered, and then kept there.
    """
    seen = recorded(model, source)
    if folder is None:
        return FoundLayout(discover(model, source, seen=seen))
    fingerprint = fingerprint_of(model, source, seen)
    proof = read(folder, fingerprint)
    layout = None if proof is None else _proven_again(proof, model, source, seen)
    if layout is not None:
        logger.info("proved the layout of %d tensors again, which was kept", len(layout.classes))
        return FoundLayout(layout, proof, is_kept=True)
    layout = discover(model, source, seen=seen)
    if "refused" in layout.classes.values():
        return FoundLayout(layout)
    proof = proof_of(layout, fingerprint, seen)
    keep(folder, proof)
    return FoundLayout(layout, proof)


def loaded_digest(state: ModelState, layers: frozenset[str], copies: Mapping[str, Bits]) -> str:
    """Return a digest of copies on the host, and of what layers hold and compute."""
    specs, digest, names = state.source.specs, blake3(), sorted(copies)
    with Pool(cores()) as pool:
        found = pool.map(lambda name: host.digest(digest_key(specs[name]), copies[name]), names)
        for name, one in zip(names, found, strict=True):
            digest.update(f"{name} {one}\n".encode())
    for name, tensor in sorted(state.tensors.items()):
        if state.owner[name] in layers:
            digest.update(f"{name} {fingerprint(tensor, (0, 1))}\n".encode())
    for layer in sorted(state.outputs):
        digest.update(f"{layer} {digest_of(state.outputs[layer]).hex()}\n".encode())
    digest.update(repr(sorted(state.numbers.items())).encode())
    return digest.hexdigest()


def proof_of(layout: Layout, fingerprint: str, seen: Recorded) -> Proof:
    return Proof(
        fingerprint=fingerprint,
        tensors={
            name: _Tensor(
                kind=kind,
                reason=layout.reasons.get(name, ""),
                windows=forms(seen.placements[name]),
                readable=name in layout.readable,
                idle=name in layout.idle,
            )
            for name, kind in layout.classes.items()
        },
        groups=tuple(
            _Group(
                method=method,
                names=group.names,
                layers=tuple(sorted(group.layers)),
                comparable=group in layout.comparable,
            )
            for method, group in layout.groups
        ),
    )


def keep(folder: Path, proof: Proof) -> None:
    """Write a proof; without room or permission for it, only warn."""
    body = msgspec.json.encode(proof)
    file = folder / f"{proof.fingerprint}.json"
    unfinished = file.with_suffix(f".{os.getpid()}")
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_folder(folder)
        unfinished.write_bytes(f"{object_digest(body)}\n".encode() + body)
        unfinished.replace(file)
        aged = sorted(folder.glob("*.json"), key=lambda one: one.stat().st_mtime)
        for old in aged[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError as exc:
        logger.warning("cannot keep the proof of a layout in %s: %s", folder, exc)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def read(folder: Path, fingerprint: str) -> Proof | None:
    """Read a kept proof; ``None`` without one that is whole and of this user."""
    file = folder / f"{fingerprint}.json"
    try:
        proof = _parsed(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as exc:
        logger.warning("cannot use the proof of a layout in %s: %s", file, exc)
        return None
    if proof.fingerprint != fingerprint:
        logger.warning("cannot use the proof of a layout in %s: it is of another engine", file)
        return None
    return proof


def _parsed(file: Path) -> Proof:
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise ValueError("it is no file of this user")
        if status.st_size > LARGEST:
            raise ValueError(f"it has {status.st_size} bytes")
        digest, _, body = opened.read().partition(b"\n")
    if digest != object_digest(body).encode():
        raise ValueError("its digest does not match")
    return decode(body, Proof)


def _agrees(proof: Proof, model: EngineModel, source: LoadedCheckpoint, seen: Recorded) -> bool:
    """Return whether a proof is about these tensors at these places, and is complete."""
    if proof.tensors.keys() != source.specs.keys():
        return False
    for name, one in proof.tensors.items():
        if one.kind in ("refused", "unused") or one.windows != forms(seen.placements[name]):
            return False
        if one.kind == "absent" and one.windows:
            return False
        if (one.kind == "in_place" or one.readable) and name not in seen.readback.held:
            return False
    loaded = {name for name, one in proof.tensors.items() if one.kind in ON_HOST}
    grouped = [(name, group.method) for group in proof.groups for name in group.names]
    layers = {layer for group in proof.groups for layer in group.layers}
    return (
        len(grouped) == len(loaded)
        and {name for name, _ in grouped} == loaded
        and all(proof.tensors[name].kind == method for name, method in grouped)
        and layers <= model.modules().keys()
    )


def _layout_of(proof: Proof, seen: Recorded) -> Layout:
    groups = [(one.method, LoadGroup(one.names, frozenset(one.layers))) for one in proof.groups]
    pairs = zip(groups, proof.groups, strict=True)
    kept = proof.tensors.items()
    return Layout(
        classes={name: one.kind for name, one in kept},
        reasons={name: one.reason for name, one in kept if one.reason},
        places={n: seen.placements[n] for n, one in kept if one.kind == "in_place"},
        groups=tuple(groups),
        readable={n: seen.placements[n] for n, one in kept if one.readable},
        comparable=frozenset(group for (_, group), one in pairs if one.comparable),
        idle=frozenset(n for n, one in kept if one.idle),
        windows={n: one.windows for n, one in kept if one.kind in ON_HOST},
    )


def _proven_again(
    proof: Proof, model: EngineModel, source: LoadedCheckpoint, seen: Recorded
) -> Layout | None:
    """Return the layout of a proof; ``None`` if anything contradicts it. The model is unchanged."""
    if not _agrees(proof, model, source, seen):
        return None
    layout = _layout_of(proof, seen)
    rewrites = again(source, seen.readback.held)
    with undisturbed(model.modules().values(), model.tensors(), rewrites) as saved:
        state = ModelState(model, source, saved)
        try:
            found = from_recording(state, seen.recording)
            found = found.not_in_place(seen.readback.reasons)
            return layout if _tried(state, found, layout) else None
        finally:
            restore_outputs(state)


def _tried(state: ModelState, found: Findings, layout: Layout) -> bool:
    """Write one layer of each kind in place, and load one group of each kind again."""
    links = links_of(state, found, layout.places)
    apart = [LoadGroup(tuple(n), all_layers(links, n)) for n in components(links, links)]
    written = some_of_each(state, found, apart, 1)
    names = {name for group in written for name in group.names}
    others = {name: "not tried" for name in found.placements if name not in names}
    if verify_in_place(state, replace(found, reasons=others)).reasons != others:
        return False
    known = replace(found, reasons=others, readable=frozenset(layout.readable))
    for method in {method for method, _ in layout.groups}:
        mine = [group for way, group in layout.groups if way == method]
        loaded = some_of_each(state, found, mine, 1)
        outcome = Trial(state, known, method, loaded).each(loaded)
        silent = outcome.idle.intersection(name for group in loaded for name in group.names)
        if outcome.refused or silent - layout.idle or outcome.moved & layout.readable.keys():
            return False
    return True


def fingerprint_of(model: EngineModel, source: LoadedCheckpoint, seen: Recorded) -> str:
    """Return a digest of whatever decides how an engine stores its weights."""
    digest = blake3(_own_code())
    for fact in _facts(model, source, seen):
        digest.update(json.dumps(fact, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


@cache
def _own_code() -> bytes:
    folder = Path(__file__).parents[2]
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py")))


def _facts(model: EngineModel, source: LoadedCheckpoint, seen: Recorded) -> Iterator[object]:
    modules = model.modules()
    packages = {type(module).__module__.partition(".")[0] for module in modules.values()}
    yield {name: _version(name) for name in sorted({*packages, "torch", "numpy", "numba"})}
    yield torch.__config__.show(), torch.backends.cpu.get_cpu_capability()
    for device in sorted({str(tensor.device) for tensor in model.tensors().values()}):
        cuda = torch.device(device).type == "cuda"
        yield str(torch.cuda.get_device_properties(device)) if cuda else device
    yield {
        name: value
        for name, value in os.environ.items()
        if name.startswith(OPTIONS)
        and not any(word.startswith(VOLATILE) for word in name.split("_"))
    }
    yield [
        [one.name, one.dtype, one.shape, forms(seen.placements[n])]
        for n, one in source.specs.items()
    ]
    yield [sorted(source.owner.items()), source.present, sorted(source.uniform)]
    yield [sorted(seen.recording.reasons.items()), sorted(map(sorted, seen.recording.together))]
    yield [sorted(model.processed()), sorted(model.made_by_running())]
    for name, module in modules.items():
        yield [name, options_of(module, named=True)]
    for file in ("config.json", "hf_quant_config.json"):
        with suppress(OSError):
            yield object_digest((model.checkpoint / file).read_bytes())


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""

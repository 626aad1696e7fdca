"""A Hugging Face checkpoint: safetensors files in a folder, read and written as bits."""

import itertools
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from deltachain.codec.container import Entry, read_header, write_header
from deltachain.delta import WINDOW_NBYTES, pieces
from deltachain.disk_space import reserve
from deltachain.errors import ConfigError, MalformedError, UnsupportedModelError
from deltachain.file_access import FileReader
from deltachain.format.documents import FileRef
from deltachain.format.keys import digest_key, digest_of_pieces
from deltachain.kernels import host
from deltachain.remote_code import without_remote_code
from deltachain.store.base import is_segment
from deltachain.threads import cores
from deltachain.types import Bits, Buffer, StateDigest, TensorSpec

RUN_FIELDS: Final = frozenset(
    {
        "dtype",
        "torch_dtype",
        "_name_or_path",
        "transformers_version",
        "use_cache",
        "_commit_hash",
        "_from_model_config",
    }
)
"""Fields of configurations that tell of a run and not of what the weights compute; trainers keep
fp32 masters of bf16 weights, and switch the cache off."""


_OF_TRAINING: Final = re.compile("drop(out|path|_prob|_rate)|layerdrop|_loss_|^initializer_")

LIBRARY: Final = "quantization_config"  # has a check of its own, which knows releases of libraries


RUNTIME: Final = frozenset(
    {"architectures", "problem_type", "output_attentions", "output_hidden_states", "return_dict"}
)
"""Fields that a trainer, ``save_pretrained`` or the model's own forward sets."""

ID_END: Final = "_token_id"  # of ids that trainers align with the tokenizer


def fields(data: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return _without(json.loads(data))
    except (ValueError, RecursionError):
        return None


def differing_fields(old: Any, new: Any) -> str:  # noqa: ANN401 - JSON
    """Name the fields in which two configurations differ; a null is an absent field."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return "" if old == new else "other content"
    found = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return ", ".join(repr(key) for key in found if key != LIBRARY)


def _without(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        kept = (k for k in value if k not in RUN_FIELDS and not _OF_TRAINING.search(k))
        return {key: _without(value[key]) for key in kept}
    return [_without(one) for one in value] if isinstance(value, list) else value


def settings_of(settings: object) -> dict[str, Any]:
    told = getattr(settings, "to_dict", None)
    found = fields(json.dumps(told(), default=str).encode()) if callable(told) else None
    return found if isinstance(found, dict) else {}


WEIGHTS_FILE: Final = "model.safetensors"
ADAPTER_FILE: Final = "adapter_model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_SHARD: Final = re.compile(r"\d+[-_]of[-_]\d+")  # in the name of a shard

_INCOMPLETE: Final = (
    "the checkpoint is incomplete, or of two saves: save or download it again, or name one "
    "safetensors file"
)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    paths: list[Path]
    index: str = ""
    places: dict[str, str] = field(default_factory=dict)


def find_weights(path: Path) -> WeightFiles:
    if path.is_file():
        return WeightFiles([path])
    there = sorted(file.name for file in path.glob("[!.]*.safetensors")) if path.is_dir() else []
    index, places = _index_of(path, there)
    names = sorted(set(places.values())) or _only_file(path, there)
    missing = [name for name in names if not (path / name).is_file()]
    if not names or missing:
        raise ConfigError(
            f"{path}: no safetensors checkpoint"
            + (f", {missing[0]} is missing" if missing else ""),
            hint=_INCOMPLETE
            if missing
            else "give a folder with model.safetensors, or one safetensors file",
        )
    left_out = [name for name in there if name not in names]
    if index != INDEX_FILE and (path / INDEX_FILE).is_file():
        left_out.append(INDEX_FILE)
    if left_out:
        logger.warning(
            "%s: reading weights from %s; ignoring %s",
            path,
            index or (names[0] if len(names) == 1 else f"{len(names)} files"),
            ", ".join(left_out),
        )
    return WeightFiles([path / name for name in names], index, places)


def _index_of(path: Path, there: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the index of a folder: the model's, or the only one of a folder without ``model*``."""
    if (path / INDEX_FILE).is_file():
        places = _read_index(path / INDEX_FILE)
        # Else an earlier save left the index: `from_pretrained` reads the whole file.
        if WEIGHTS_FILE not in there or set(places.values()) == {WEIGHTS_FILE}:
            return INDEX_FILE, places
    if WEIGHTS_FILE in there or ADAPTER_FILE in there:
        return "", {}
    read = ((file.name, _read_index(file)) for file in path.glob("[!.]*.safetensors.index*.json"))
    found = [(name, places) for name, places in read if not set(there).isdisjoint(places.values())]
    return found[0] if len(found) == 1 else ("", {})


def _read_index(index: Path) -> dict[str, str]:
    try:
        places = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
        raise MalformedError(f"{index}: weight_map is missing", key=str(index)) from exc
    for name in places.values():
        if not isinstance(name, str) or "/" in name or name.startswith("."):
            raise MalformedError(f"{index}: names a file outside the folder", key=str(index))
    if not places:
        raise MalformedError(f"{index}: weight_map is empty", key=str(index))
    return places


def _only_file(path: Path, there: Sequence[str]) -> list[str]:
    """Return the model's or the adapter's file, else the only one; none of an empty folder."""
    own = [name for name in (WEIGHTS_FILE, ADAPTER_FILE) if name in there][:1]
    if own or not there:
        return own
    if len(there) > 1 or _SHARD.search(there[0]):
        raise UnsupportedModelError(
            f"{path} has several sets of weights, or shards without an index, and none is named "
            f"as the model's: {', '.join(there[:4])}",
            hint=f"move the files away that are not the model's, or write {INDEX_FILE}, whose "
            "weight_map has the file of each tensor",
        )
    return list(there)


_HASHED_NBYTES: Final = 16 << 20  # bytes of a file that are read and hashed at a time

logger = logging.getLogger(__name__)

PEFT_PREFIX: Final = "base_model.model."  # of the names of an adapter's tensors, by most methods
ADAPTER_CONFIG: Final = "adapter_config.json"  # configuration of an adapter of PEFT

_CONFIG: Final = "config.json"

HELD_FILE: Final = "deltachain.json"  # status of a folder that follows a chain

_ASSET: Final = re.compile(
    r".*\.(json|txt|model|jinja|spm|tiktoken|bpe|codes|tokenizer|npy)|tokenizer\.model\.v\w+",
    re.DOTALL,
)
"""Names of assets, the small files published with a chain. Code is excluded: write access to a
store must not grant execution where a follower's folder is loaded. References to remote code and
pickled objects are removed as well; see ``remote_code.py``."""

_NO_ASSET: Final = re.compile(
    r".*\.index\.json|trainer_state\.json|(all|eval|train)_results\.json", re.IGNORECASE
)
"""Names of files that describe other files, or a run."""

_ASSET_FOLDER: Final = re.compile(
    r"additional_chat_templates|[0-9]+_\w+|\w*(tokenizer|processor|feature_extractor)\w*"
    r"|language_model|speaker_embeddings"
)
"""Names of folders with assets: further templates, modules of sentence-transformers, and parts of a
processor."""

_INNER: Final = re.compile(rf"{_ASSET_FOLDER.pattern}|dense\w*|\w*heads?|\w*projector")
"""Names of folders with parts of a model: folders of assets, heads and projectors."""

_WEIGHTS: Final = re.compile(
    r"(?!training_args|optimizer|scheduler|rng_state|random_states|scaler|pytorch_model|adapter_model"
    r"|consolidated|tf_model|flax_model).*\.(bin|pt|pth|ckpt|h5|npz)"
    r"|[^/]+/.*\.(safetensors|bin|pt|pth|ckpt)"
)
"""Paths of weights that are not published, unless they are a trainer's state or the same in another
format."""

_APART: Final = re.compile(
    rf"\..*|{re.escape(HELD_FILE)}|(README|LICENSE|NOTICE)[^/]*|__pycache__/"
    r"|[^/]*\.(md|log|lock|png|jpe?g|gif|svg|pdf)"
    r"|(checkpoint-|global_step)\d+/|(runs|logs|wandb)/|events\.out\..*"
    r"|.*\.(safetensors|bin|pt|pth|ckpt|h5|npz|msgpack|ot|distcp)",
    re.IGNORECASE,
)
"""Paths of weights, and of files that no save of a model or a processor writes."""

_NAMED: Final = 8  # most files that a warning names
_PARTIAL: Final = re.compile(r"\..+\.[0-9a-f]{16}")  # names of unfinished files
ASSET_NBYTES: Final = 64 << 20  # size limit of an asset, in bytes


def named_folder(named: str, *, revision: str | None = None, cache: str | None = None) -> Path:
    folder = Path(named)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - seldom needed, and slow

    try:
        found = snapshot_download(named, revision=revision, cache_dir=cache, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{named!r} is neither a checkpoint folder nor a repository in the cache of the Hub",
            hint="download it first; `deltachain pull URL --out FOLDER` makes a folder of a chain",
        ) from exc
    return Path(found)


class Checkpoint:
    """The tensors of one safetensors file, or of the weights in a folder.

    Of several sets of weights in a folder, ``model.safetensors`` counts, else the files of
    ``model.safetensors.index.json``, the adapter, the files of the only other index, or the only
    file. Others are named in a warning. Files are read by calls, none stays open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = find_weights(path)
        self._files, self.index, places = found.paths, found.index, found.places
        self._readers: dict[str, FileReader] = {}
        self._entries: dict[str, tuple[str, Entry]] = {}
        for file in self._files:
            reader = self._readers[file.name] = FileReader(file)
            header = read_header(reader.read_at, reader.nbytes, key=str(file))
            for name, entry in header.entries.items():
                if name in self._entries:
                    raise UnsupportedModelError(
                        f"{path}: {name!r} is in two files, {self._entries[name][0]} and "
                        f"{file.name}",
                        hint="remove the file that is not part of this checkpoint, or name one "
                        "safetensors file",
                    )
                self._entries[name] = (file.name, entry)
        for name, where in sorted(places.items()):
            if name not in self._entries or self._entries[name][0] != where:
                raise UnsupportedModelError(
                    f"{path}: {self.index} has {name!r} in {where}, which does not hold it",
                    hint="the checkpoint is incomplete, or of two saves: save or download it again",
                )
        self.unnamed = sorted(self._entries.keys() - places.keys()) if places else []
        self.specs: Mapping[str, TensorSpec] = MappingProxyType(
            {n: TensorSpec(n, e.dtype, e.shape) for n, (_, e) in sorted(self._entries.items())}
        )

    def bits(
        self,
        name: str,
        low: int = 0,
        high: int | None = None,
        *,
        make: Callable[..., Bits] = np.empty,
    ) -> Bits:
        """Return the bits of a tensor in new memory, or of its elements ``[low, high)`` alone."""
        file, entry = self._entries[name]
        spec = self.specs[name]
        stop = spec.numel if high is None else min(high, spec.numel)
        start, stop = (entry.start + at * spec.itemsize for at in (low, stop))
        return self._readers[file].bits(start, stop, spec.bits_dtype, make)

    def differ(self, one: str, other: str) -> bool:
        windows = pieces([self.specs[one]], WINDOW_NBYTES)
        pairs = ((self.bits(one, *at), self.bits(other, *at)) for _, *at in windows)
        return not all(map(host.equal, *zip(*pairs, strict=True)))

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self._files)

    def place(self, name: str) -> tuple[Path, int]:
        file, entry = self._entries[name]
        return next(path for path in self._files if path.name == file), entry.start

    def digest(self, name: str) -> StateDigest:
        spec, parts = self.specs[name], list[StateDigest]()
        for _, low, high in pieces([spec], WINDOW_NBYTES):
            parts.append(host.digest(digest_key(spec), self.bits(name, low, high), low))
        return sum(parts, StateDigest())

    def state(self, names: Iterable[str]) -> StateDigest:
        return sum((self.digest(name) for name in names), StateDigest())

    def files(self) -> Iterator[FileRef]:
        for name, reader in self._readers.items():
            starts = range(0, reader.nbytes, _HASHED_NBYTES)
            pieces = (reader.read_at(start, _HASHED_NBYTES) for start in starts)
            yield FileRef(
                name=name, nbytes=reader.nbytes, blake3=digest_of_pieces(pieces, threads=cores())
            )

    def assets(self, *, trusted: bool = False) -> dict[str, bytes]:
        return read_assets(self.path, trusted=trusted) if self.path.is_dir() else {}


def read_assets(
    folder: Path, *, trusted: bool = False, told: Collection[str] | None = ()
) -> dict[str, bytes]:
    """Read the configuration and tokenizer files of a checkpoint folder, by path in it.

    ``told``: small files without a warning though they are no assets; ``None`` for no warning.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", hint="name a folder of configuration files")
    found: dict[str, bytes] = {}
    for name in _names(folder):
        if not _is_carried(folder, name):
            if _WEIGHTS.fullmatch(name) and told is not None:
                logger.warning("%s: weights in %s are not published", folder, name)
            continue
        data = (folder / name).read_bytes()
        kept = without_remote_code(name, data, trusted=trusted, where=str(folder))
        if kept is not None:
            found[name] = kept
    left = [] if told is None else [name for name in left_out(folder) if name not in told]
    if left:
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        named = ", ".join(left[:_NAMED])
        logger.warning("%s: not published, followers lack them: %s%s", folder, named, more)
    return found


def left_out(folder: Path) -> list[str]:
    """Return the paths of small files that are no assets, and folders without any."""
    left = (name for name in _names(folder) if not _is_carried(folder, name))
    return [name for name in left if not _APART.fullmatch(name) and not _NO_ASSET.fullmatch(name)]


def _names(folder: Path) -> list[str]:
    found = []
    for one in sorted(folder.iterdir()):
        if one.is_dir() and _INNER.fullmatch(one.name):
            files = sorted(one.iterdir())
            found += [f"{one.name}/{file.name}{'/' * file.is_dir()}" for file in files]
        else:
            found.append(f"{one.name}{'/' * one.is_dir()}")
    return found


def _is_carried(folder: Path, name: str) -> bool:
    file = folder / name
    return is_asset(name) and file.is_file() and file.stat().st_size <= ASSET_NBYTES


def is_asset(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return (
        _ASSET.fullmatch(file) is not None
        and _NO_ASSET.fullmatch(file) is None
        and file.lower() != HELD_FILE
        and is_segment(file)
        and (not folder or (_ASSET_FOLDER.fullmatch(folder) is not None and is_segment(folder)))
    )


def weights_file(names: Iterable[str], assets: Collection[str] = ()) -> str:
    """Return the file name of the weights: PEFT's if configuration or names say so."""
    is_adapter = ADAPTER_CONFIG in assets and _CONFIG not in assets
    is_adapter = is_adapter or all(name.startswith(PEFT_PREFIX) for name in names)
    return ADAPTER_FILE if is_adapter else WEIGHTS_FILE


def begin(file: Path, specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Write the header of a safetensors file; return the offset of each tensor's data by name.

    Wide elements come first, so that every tensor is aligned.
    """
    ordered = sorted(specs, key=lambda spec: (-spec.itemsize, spec.name))
    rows = [(spec.name, spec.dtype, spec.shape, spec.nbytes) for spec in ordered]
    header = write_header({"format": "pt"}, rows)
    file.write_bytes(header)
    starts = itertools.accumulate((spec.nbytes for spec in ordered), initial=len(header))
    return {spec.name: start for spec, start in zip(ordered, starts, strict=False)}


@contextmanager
def creating(file: Path) -> Iterator[Path]:
    """Yield a new, empty file that atomically and durably replaces ``file`` on success."""
    partial = create(file)
    try:
        yield partial
        put_in_place(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def create(file: Path) -> Path:
    """Create an empty file that is to replace ``file``.

    Its name is random: a link that another user of the folder planted is not followed.
    """
    partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return partial


def put_in_place(partial: Path, file: Path) -> None:
    with partial.open("r+b") as written:
        os.fsync(written.fileno())
    partial.replace(file)
    sync_folder(file.parent)


def remove_partials(folder: Path, *patterns: str) -> None:
    """Remove files by pattern that killed processes were creating; nobody may be creating one."""
    for pattern in patterns:
        for left in folder.glob(pattern):
            if _PARTIAL.fullmatch(left.name):
                left.unlink()


def write_atomic(file: Path, data: Buffer) -> None:
    with creating(file) as partial:
        partial.touch()
        reserve(partial, len(data))
        with partial.open("r+b") as out:
            out.write(data)


def sync_folder(folder: Path) -> None:
    sync(folder)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Independent comparison of a checkpoint's bf16 bits with those of the trainer.

Runs by file path and shares no code with deltachain, so that an error in deltachain's reader,
writer, names or digests cannot hide itself. A *dump* is an ``.npz`` of every tensor of a
``state_dict``, cast to bf16 and viewed as int16; safetensors files are parsed here with json and
numpy alone.

::

    python compare_bits.py dump FOLDER DUMP.npz      cast a checkpoint to bf16 and dump its bits
    python compare_bits.py compare DUMP.npz ACTUAL   ACTUAL: dump, safetensors file or their folder

Both print one JSON object; ``compare`` exits with 1 unless every bit is equal.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Int16Bits: TypeAlias = npt.NDArray[np.int16]

_ALIASES: Final = "__aliases__"
"""Entry of a dump with the tied names, JSON in UTF-8."""

_WIDTH: Final = 16
_ONES: Final = np.array([number.bit_count() for number in range(1 << _WIDTH)], dtype=np.uint8)
"""Number of set bits of each 16-bit number; numpy has ``bitwise_count`` only from 2.0 on."""

_LONGEST_HEADER: Final = 100_000_000
_TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of a comparison."""

    elements: int
    mismatching_bits: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.elements > 0 and self.mismatching_bits == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Tensors by name (None if not bf16), and the stored name of each tied name."""

    tensors: Mapping[str, Int16Bits | None]
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]

    def size(self, name: str) -> int:
        return math.prod(self.shapes[name])


def dump_bits(model: torch.nn.Module, path: Path) -> None:
    """Write the bf16 bits of all parameters and persistent buffers, atomically."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        owner = first.setdefault(place, name)
        if owner != name and tensor.numel():
            aliases[name] = owner
    _write_dump({name: _bf16_bits(tensor) for name, tensor in state.items()}, aliases, path)


def dump_checkpoint(checkpoint: Path, path: Path) -> None:
    """Write the bits of a safetensors file or folder, cast to bf16."""
    bits: dict[str, Int16Bits] = {}
    for file in _safetensors_files(checkpoint):
        for name, dtype, shape, raw in _read_safetensors(file):
            if dtype not in _TORCH_DTYPES:
                raise ValueError(
                    f"{file}: {name} has dtype {dtype}, which has no cast to bf16 here"
                )
            flat = torch.frombuffer(bytearray(raw), dtype=_TORCH_DTYPES[dtype])
            bits[name] = _bf16_bits(flat.reshape(shape))
    _write_dump(bits, {}, path)


def compare(dump: Path, actual: Path) -> Comparison:
    """Count the bits in which a dump, a safetensors file or a folder of them differs."""
    wanted, found = _read_dump(dump), _read(actual)
    aliases = {**found.aliases, **wanted.aliases}
    by_owner = {aliases.get(name, name): name for name in wanted.tensors}
    present = {aliases.get(name, name) for name in found.tensors}
    missing = [name for owner, name in by_owner.items() if owner not in present]
    unexpected = [name for name in found.tensors if aliases.get(name, name) not in by_owner]
    wrong = {
        name: _differing_bits(wanted.tensors[by_owner[aliases.get(name, name)]], bits)
        for name, bits in found.tensors.items()
        if name not in unexpected
    }
    lone = sum(wanted.size(name) for name in missing) + sum(map(found.size, unexpected))
    return Comparison(
        elements=lone + sum(map(found.size, wrong)),
        mismatching_bits=lone * _WIDTH + sum(wrong.values()),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        different=tuple(name for name, bits in wrong.items() if bits),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    dumping = commands.add_parser("dump", help="dump the bf16 bits of a checkpoint")
    dumping.add_argument("checkpoint", type=Path)
    dumping.add_argument("out", type=Path)
    comparing = commands.add_parser("compare", help="count differing bits")
    comparing.add_argument("dump", type=Path)
    comparing.add_argument("actual", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "dump":
        dump_checkpoint(options.checkpoint, options.out)
        _say({"dumped": str(options.out), "tensors": len(_read(options.out).tensors)})
        return 0
    result = compare(options.dump, options.actual)
    _say({**asdict(result), "equal": result.equal})
    return 0 if result.equal else 1


def _say(outcome: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(outcome) + "\n")


def _bf16_bits(tensor: torch.Tensor) -> Int16Bits:
    bits: Int16Bits = (
        tensor.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    )
    return bits


def _write_dump(tensors: Mapping[str, Int16Bits], aliases: Mapping[str, str], path: Path) -> None:
    tied = np.frombuffer(json.dumps(aliases).encode(), dtype=np.uint8)
    entries: dict[str, Any] = {**tensors, _ALIASES: tied}
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, **entries)
    unfinished.replace(path)


def _read(path: Path) -> Dump:
    return _read_dump(path) if path.suffix == ".npz" else _read_checkpoint(path)


def _read_dump(path: Path) -> Dump:
    with np.load(path, allow_pickle=False) as archive:
        aliases = json.loads(archive[_ALIASES].tobytes())
        tensors = {name: archive[name] for name in archive.files if name != _ALIASES}
    shapes = {name: tuple(bits.shape) for name, bits in tensors.items()}
    return Dump(tensors=tensors, shapes=shapes, aliases=aliases)


def _read_checkpoint(path: Path) -> Dump:
    tensors: dict[str, Int16Bits | None] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _safetensors_files(path):
        for name, dtype, shape, raw in _read_safetensors(file):
            if name in tensors:
                raise ValueError(f"{file}: {name} is also in an earlier file")
            shapes[name] = shape
            tensors[name] = (
                np.frombuffer(raw, dtype="<i2").reshape(shape) if dtype == "BF16" else None
            )
    return Dump(tensors=tensors, shapes=shapes, aliases={})


def _safetensors_files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: no safetensors file in this folder")
    return files


def _read_safetensors(path: Path) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"{path}: invalid header length {length}")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            file.seek(8 + length + start)
            raw = file.read(end - start)
            if len(raw) != end - start:
                raise ValueError(f"{path}: {name} ends after {len(raw)} of {end - start} bytes")
            yield name, entry["dtype"], tuple(entry["shape"]), raw


def _differing_bits(wanted: Int16Bits | None, found: Int16Bits | None) -> int:
    if wanted is None:
        raise ValueError("a dump holds bf16 bits only")
    if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return wanted.size * _WIDTH
    return int(_ONES[(wanted ^ found).view(np.uint16)].sum(dtype=np.int64))


if __name__ == "__main__":
    sys.exit(main())

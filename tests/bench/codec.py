"""Benchmark of the codec: size and speed of deltas with the statistics of RL updates.

Sizes include all bytes of the part and the manifest that commits it, whose size does not grow with
the model. Speeds include all digests: encoding computes the state digest of the changes and blake3
of frames and part; decoding verifies every frame. Every part, and every update in the layout of
another system, is decoded and compared bit for bit before anything is timed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from deltachain.chain.plan import VERSIONS_LISTED, KnownEdges
from deltachain.codec import ENCODINGS as REGISTRY
from deltachain.codec import Change, EncodedPart, Part, encode_part
from deltachain.delta import ABSOLUTE, STEP, OldBits, TensorDelta
from deltachain.format.documents import Edge, EdgeSummary, Manifest, ObjectRef, seal
from deltachain.format.keys import digest_key, payload_key
from deltachain.kernels import host
from deltachain.types import Bits
from tests.bench import report
from tests.bench.chains import LARGE, ChangedTensors, SyntheticChain, count, dense_nbytes
from tests.bench.layouts import LAYOUTS, Objects, PeerLayout, Specs, specs_of
from tests.bench.report import Candidate, Timings, one_core, round_robin, say
from tests.bench.updates import GIVEN_BASE, WITHOUT_BASE, Update, updates

COLUMNS: Final = 6

SPEED: Final = "Encode / decode, dense GB a second"
TIME: Final = "Encode / decode, ns a change, with all digests"

Row: TypeAlias = Mapping[str, Any]
Pair: TypeAlias = Callable[[Row], tuple[float, float]]


def tables(rows: Sequence[Row]) -> list[Any]:
    groups = [rows[start : start + COLUMNS] for start in range(0, len(rows), COLUMNS)]
    timed = [row for row in rows if row["full_copy"]["encode_ns"]]
    return [
        *(_layout_sizes(group) for group in groups),
        _speeds(rows, SPEED, lambda e: (e["encode_gb_per_s"], e["decode_gb_per_s"])),
        _speeds(rows, TIME, lambda e: (e["encode_ns"], e["decode_ns"])),
        *([_layout_speeds(timed)] if timed else []),
    ]


def _layout_sizes(rows: Sequence[Row]) -> Any:
    title = "Bits a changed element, everything counted, beside other systems' layouts"
    table = report.grid(title, "", *(row["label"] for row in rows))
    for number, encoding in enumerate(rows[0]["encodings"]):
        cells = (f"{row['encodings'][number]['bits']:.2f}" for row in rows)
        table.add_row(f"deltachain {encoding['encoding']}", *cells, style="bold")
    for name in LAYOUTS:
        found = (row["layouts"].get(name) for row in rows)
        cells = (f"{one['bits']:.2f}" if one else "-" for one in found)
        table.add_row(name, *cells)
    for name in (WITHOUT_BASE, GIVEN_BASE):
        table.add_row(name, *(f"{row['limits'][name]:.2f}" for row in rows), style="dim")
    return table


def _speeds(rows: Sequence[Row], title: str, pair: Pair) -> Any:
    table = report.grid(title, "", *(e["encoding"] for e in rows[0]["encodings"]))
    for row in rows:
        table.add_row(row["label"], *(_pair(*pair(e)) for e in row["encodings"]))
    return table


def _layout_speeds(rows: Sequence[Row]) -> Any:
    title = "Encode / decode of others' layouts, ns a change, without digests"
    table = report.grid(title, "", *(row["label"] for row in rows))
    for name in (*LAYOUTS, rows[0]["full_copy"]["layout"]):
        found = (row["layouts"].get(name, row["full_copy"]) for row in rows)
        cells = (
            _pair(one["encode_ns"], one["decode_ns"]) if one["layout"] == name else "-"
            for one in found
        )
        table.add_row(name, *cells)
    return table


def _pair(encode: float | None, decode: float | None) -> str:
    return f"{encode:.1f} / {decode:.1f}"


ENCODINGS: Final = ("step", "max", "overwrite", "raw")
LISTED_FROM: Final = 992

ROUNDS: Final = 10
OWN_FACTOR: Final = 4
"""As many times more rounds elsewhere: deltachain's encodings alone take milliseconds each."""

FULL_COPY: Final = "full copy"

Old: TypeAlias = Mapping[str, Bits]


def encode(changes: ChangedTensors, old: Old, encoding: str) -> EncodedPart:
    return encode_part(_parts(changes, old, encoding), raw=REGISTRY.get(encoding).own_arrays)


def decode(data: bytes, old: Old) -> list[TensorDelta]:
    part = Part.from_bytes(data)
    return [part.read(name, old=OldBits(old[name])) for name in part.rows]


def check(changes: ChangedTensors, deltas: Sequence[TensorDelta]) -> None:
    left = {name for name, change in changes.items() if change.indices.size}
    for delta in deltas:
        change = changes[delta.spec.name]
        indices = np.arange(change.numel) if delta.indices is None else delta.indices
        exact = np.array_equal(indices, change.indices)
        if not exact or not np.array_equal(delta.new_bits(change.old), change.new):
            raise ArithmeticError(f"{delta.spec.name} does not decode to what was encoded")
        left.discard(delta.spec.name)
    if left:
        raise ArithmeticError(f"{sorted(left)} were encoded, and not decoded")


def manifest_nbytes(part: EncodedPart, numel: int) -> int:
    """Return the mean size of manifests that commit such parts, in bytes, rounded up."""
    versions = range(LISTED_FROM, LISTED_FROM + VERSIONS_LISTED)
    return -(-sum(_manifest_nbytes(part, numel, one) for one in versions) // len(versions))


def _manifest_nbytes(part: EncodedPart, numel: int, version: int) -> int:
    digest, state, commit = "0" * 64, "0" * 32, "0" * 32
    key = payload_key("delta", version, 0, commit, 0)
    ref = ObjectRef(key=key, nbytes=len(part.content), blake3=part.digest, directory=part.directory)
    first = version - VERSIONS_LISTED
    before = tuple(
        EdgeSummary(
            version=number,
            kind="delta",
            base=number - 1,
            nbytes=len(part.content),
            parts=1,
            encodings=part.encodings,
            state=state,
        )
        for number in range(first, version)
    )
    recent, window_from = KnownEdges(before, first).listed(version)
    manifest = Manifest(
        chain=commit,
        version=version,
        epoch=0,
        commit_id=commit,
        parent=digest,
        step=version,
        time=1.7e9,
        base_state=state,
        state=state,
        nnz=part.nnz,
        numel=numel,
        edge=Edge(kind="delta", base=version - 1, encodings=part.encodings, parts=(ref,)),
        recent=recent,
        window_from=window_from,
    )
    return len(seal(manifest))


def measure(update: Update, rounds: int) -> dict[str, Any]:
    say(f"update {update.label}")
    changes = update.changes
    parts = {encoding: encode(changes, update.old, encoding) for encoding in ENCODINGS}
    for part in parts.values():
        check(changes, decode(part.data, update.old))
    numel = sum(change.numel for change in changes.values())
    manifest = manifest_nbytes(parts["step"], numel)
    peers = _peers(update)
    with one_core():
        timings = round_robin(
            [*_own(update, parts), *_others(update, peers)],
            rounds if update.peers_timed else OWN_FACTOR * rounds,
        )
    return {
        "label": update.label,
        "lr": update.lr,
        "dtype": update.dtype,
        "density": count(changes) / numel,
        "numel": numel,
        "nnz": count(changes),
        "dense_nbytes": dense_nbytes(changes),
        "manifest_nbytes": manifest,
        "encodings": [
            _encoding_row(name, len(part.content), manifest, changes, timings)
            for name, part in parts.items()
        ],
        "layouts": {
            name: _layout_row(name, sum(map(len, objects)), update, timings)
            for name, objects in peers.items()
        },
        "full_copy": _layout_row(FULL_COPY, dense_nbytes(changes), update, timings),
        "limits": update.limits,
    }


def run(base: SyntheticChain, rounds: int = ROUNDS) -> Mapping[str, Any]:
    rows = [measure(update, rounds) for update in updates(base)]
    return {
        "benchmark": "codec",
        "rounds": rounds,
        "threads": 1,
        "rows": rows,
        "machine": report.machine(),
    }


def main(*, json_output: bool) -> int:
    document = run(SyntheticChain(seed=1, layout=LARGE))
    report.emit(document, tables(document["rows"]), json_output=json_output)
    return 0


def _parts(changes: ChangedTensors, old: Old, encoding: str) -> Iterator[Change]:
    chosen = REGISTRY.get(encoding)
    for change in changes.values():
        if not change.indices.size:
            continue
        absolute = chosen.absolute
        delta = TensorDelta(
            spec=change.spec,
            indices=change.indices,
            values=change.new if absolute else change.new - change.old,
            absolute=ABSOLUTE if absolute else STEP,
        )
        key = digest_key(change.spec)
        digest = host.digest_at(key, change.indices, change.new)
        digest -= host.digest_at(key, change.indices, change.old)
        kept = chosen.needs_old and chosen.suits(change.spec)  # as publishers choose
        with_old = chosen.encodes_with_old(change.spec)
        before = partial(OldBits, old[change.spec.name]) if with_old else None
        yield Change(delta, digest, encoding=chosen if kept else None, old=before)


def _peers(update: Update) -> dict[str, Objects]:
    objects = {}
    for name, layout in LAYOUTS.items():
        if layout.any_dtype or update.dtype == "BF16":
            objects[name] = layout.encode(update.changes)
            layout.check(update.changes, objects[name])
    return objects


def _own(update: Update, parts: Mapping[str, EncodedPart]) -> Iterator[Candidate]:
    for name, part in parts.items():
        yield Candidate(f"encode {name}", partial(encode, update.changes, update.old, name))
        yield Candidate(f"decode {name}", partial(decode, part.data, update.old))


def _others(update: Update, peers: Mapping[str, Objects]) -> Iterator[Candidate]:
    if not update.peers_timed:
        return
    specs = specs_of(update.changes)
    for name, objects in peers.items():
        layout: PeerLayout = LAYOUTS[name]
        yield Candidate(f"encode {name}", partial(layout.encode, update.changes))
        yield Candidate(f"decode {name}", partial(_drain, layout, objects, specs))
    copy, back = ({n: bits.copy() for n, bits in update.old.items()} for _ in range(2))
    yield Candidate(f"encode {FULL_COPY}", partial(_copy, update.old, copy))
    yield Candidate(f"decode {FULL_COPY}", partial(_copy, copy, back))


def _drain(layout: PeerLayout, objects: Objects, specs: Specs) -> None:
    deque(layout.decode(objects, specs), maxlen=0)


def _copy(source: Mapping[str, Bits], target: Mapping[str, Bits]) -> None:
    for name, bits in source.items():
        np.copyto(target[name], bits)


def _encoding_row(
    name: str, nbytes: int, manifest: int, changes: ChangedTensors, timings: Timings
) -> dict[str, Any]:
    nnz, dense = count(changes), dense_nbytes(changes)
    row: dict[str, Any] = {
        "encoding": name,
        "nbytes": nbytes,
        "bits": 8 * (nbytes + manifest) / nnz,
    }
    for way in ("encode", "decode"):
        took = timings.best(f"{way} {name}")
        row |= {f"{way}_gb_per_s": dense / took / 1e9, f"{way}_ns": took / nnz * 1e9}
    return row


def _layout_row(name: str, nbytes: int, update: Update, timings: Timings) -> dict[str, Any]:
    nnz = count(update.changes)
    row: dict[str, Any] = {"layout": name, "nbytes": nbytes, "bits": 8 * nbytes / nnz}
    for way in ("encode", "decode"):
        took = timings.best(f"{way} {name}") if update.peers_timed else None
        row[f"{way}_ns"] = took and took / nnz * 1e9
    return row

"""Benchmark of the codec: size and speed of deltas with the statistics of RL updates.

Sizes include all bytes of the part and the manifest that commits it, whose size does not grow with
the model. Speeds include all digests: encoding computes the state digest of the changes and blake3
of frames and part; decoding verifies every frame. Every part is decoded and compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from deltachain.bench import report
from deltachain.bench.chains import Step, SyntheticChain
from deltachain.bench.layouts import LAYOUTS, ChangedTensors, bits_per_change, changes_of
from deltachain.bench.limits import entropy_limits
from deltachain.bench.timing import Candidate, one_core, round_robin, say
from deltachain.chain.recent_edges import VERSIONS_LISTED
from deltachain.codec import ENCODINGS as REGISTRY
from deltachain.codec import Change, EncodedPart, Part, encode_part
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.format.digest import digest_key
from deltachain.format.documents import Edge, EdgeSummary, Manifest, ObjectRef, seal
from deltachain.format.keys import payload_key
from deltachain.kernels import host
from deltachain.types import TensorSpec

DENSITIES: Final = (0.0013, 0.007, 0.012, 0.025)
LEARNING_RATES: Final = (1e-6, 3e-6, 1e-5)
ENCODINGS: Final = ("step", "overwrite", "raw")
ROUNDS: Final = 10

AIM_DENSITY: Final = 0.012
AIMS: Final[dict[str, float]] = {"step": 10.0, "overwrite": 20.0}
"""Limits of bits a change at about ``AIM_DENSITY``, by encoding."""

TICKS: Final = (0.1, 0.2, 0.5, 1, 2, 5)
"""Range of the plot, in percent."""

Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingRow:
    """One encoding of one update; speeds in dense bf16 gigabytes, or by changed element.

    ``nbytes`` is the part; ``bits`` counts the part and its manifest.
    """

    encoding: str
    nbytes: int
    bits: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    encode_ns: float
    decode_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRow:
    """One update of one chain.

    Attributes:
        label: How the learning rate was chosen.
        lr: Learning rate.
        density: Changed over all elements.
        numel: Number of elements of the model.
        nnz: Number of changed elements.
        manifest_nbytes: Size of the manifest with a full window of recent edges, in bytes.
        encodings: Figures of deltachain's encodings.
        layouts: Bits a change of other projects' formats, by name.
        limits: Entropy limits in bits a change, by name.
    """

    label: str
    lr: float
    density: float
    numel: int
    nnz: int
    manifest_nbytes: int
    encodings: Sequence[EncodingRow]
    layouts: Mapping[str, float]
    limits: Mapping[str, float]


def encode(specs: Specs, changes: ChangedTensors, encoding: str) -> EncodedPart:
    """Encode an update as one part, including the state digest of its changes."""
    return encode_part(_parts(specs, changes, encoding), raw=REGISTRY.get(encoding).own_arrays)


def decode(data: bytes) -> list[TensorDelta]:
    """Decode all tensors of a part."""
    return list(Part.from_bytes(data))


def check(changes: ChangedTensors, deltas: Sequence[TensorDelta]) -> None:
    """Compare decoded deltas with the update, bit for bit.

    Raises:
        ArithmeticError: They differ.
    """
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
    """Return the size of the manifest that commits ``part``, in bytes."""
    digest, state = "0" * 64, "0" * 32
    version, commit = 1000, "0" * 32
    key = payload_key("delta", version, 0, commit, 0)
    ref = ObjectRef(key=key, nbytes=len(part.content), blake3=part.digest, directory=part.directory)
    recent = tuple(
        EdgeSummary(
            version=number,
            kind="delta",
            base=number - 1,
            nbytes=len(part.content),
            parts=1,
            encodings=part.encodings,
            state=state,
        )
        for number in range(version - VERSIONS_LISTED, version)
    )
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
        window_from=version - VERSIONS_LISTED,
    )
    return len(seal(manifest))


def measure(chain: SyntheticChain, label: str, rounds: int) -> ChainRow:
    """Encode one update with each encoding; check and measure each, on one core."""
    say(f"chain {label}")
    step = next(chain.steps(1))
    specs = {spec.name: spec for spec in chain.layout.specs()}
    changes = changes_of(step)
    parts = {encoding: encode(specs, changes, encoding) for encoding in ENCODINGS}
    for part in parts.values():
        check(changes, decode(part.data))
    numel = sum(change.numel for change in changes.values())
    nnz = sum(change.indices.size for change in changes.values())
    manifest = manifest_nbytes(parts["step"], numel)
    return ChainRow(
        label=label,
        lr=chain.lr,
        density=nnz / numel,
        numel=numel,
        nnz=nnz,
        manifest_nbytes=manifest,
        encodings=_time(specs, changes, parts, rounds, manifest),
        layouts={name: bits_per_change(size(changes), changes) for name, size in LAYOUTS.items()},
        limits=_limits(step),
    )


def chains(base: SyntheticChain) -> Iterator[tuple[str, SyntheticChain]]:
    """Yield the chains to measure: by density, then by learning rate."""
    for density in DENSITIES:
        yield f"at {density:.2%}", base.with_density(density)
    for lr in LEARNING_RATES:
        yield f"lr {lr:.0e}", replace(base, lr=lr)


def missed(rows: Sequence[ChainRow]) -> list[str]:
    """Return the encodings above their size limit."""
    at = min(rows, key=lambda row: abs(row.density - AIM_DENSITY))
    return [e.encoding for e in at.encodings if e.bits > AIMS.get(e.encoding, np.inf)]


def run(
    base: SyntheticChain,
    named: Callable[[SyntheticChain], Iterator[tuple[str, SyntheticChain]]] = chains,
    *,
    rounds: int = ROUNDS,
) -> tuple[list[ChainRow], Mapping[str, Any]]:
    """Measure every chain; return the rows, and all figures for JSON."""
    rows = [measure(chain, label, rounds) for label, chain in named(base)]
    document = {
        "benchmark": "codec",
        "rounds": rounds,
        "threads": 1,
        "rows": [asdict(row) for row in rows],
        "aim_density": AIM_DENSITY,
        "aims": AIMS,
        "missed": missed(rows),
        "machine": report.machine(),
    }
    return rows, document


def main(*, json_output: bool, plot: Path | None = None) -> int:
    """Run ``deltachain bench codec``; return 0 if all encodings are within their size limits."""
    rows, document = run(SyntheticChain(seed=1))
    report.emit(document, [_sizes(rows), _speeds(rows)], json_output=json_output)
    if plot is not None:
        _draw(rows, plot)
    return 1 if document["missed"] else 0


def _parts(specs: Specs, changes: ChangedTensors, encoding: str) -> Iterator[Change]:
    for name, change in changes.items():
        if not change.indices.size:
            continue
        absolute = REGISTRY.get(encoding).absolute
        delta = TensorDelta(
            spec=specs[name],
            indices=change.indices,
            values=change.new if absolute else change.new - change.old,
            absolute=ABSOLUTE if absolute else STEP,
        )
        key = digest_key(specs[name])
        digest = host.digest_at(key, change.indices, change.new)
        yield Change(delta, digest - host.digest_at(key, change.indices, change.old))


def _time(
    specs: Specs,
    changes: ChangedTensors,
    parts: Mapping[str, EncodedPart],
    rounds: int,
    manifest: int,
) -> list[EncodingRow]:
    candidates = []
    for name, part in parts.items():
        candidates.append(Candidate(f"encode {name}", partial(encode, specs, changes, name)))
        candidates.append(Candidate(f"decode {name}", partial(decode, part.data)))
    with one_core():
        timings = round_robin(candidates, rounds)
    nnz = sum(change.indices.size for change in changes.values())
    dense = 2 * sum(change.numel for change in changes.values())
    rows = []
    for name, part in parts.items():
        to_encode, to_decode = timings.best(f"encode {name}"), timings.best(f"decode {name}")
        rows.append(
            EncodingRow(
                encoding=name,
                nbytes=len(part.content),
                bits=8 * (len(part.content) + manifest) / nnz,
                encode_gb_per_s=dense / to_encode / 1e9,
                decode_gb_per_s=dense / to_decode / 1e9,
                encode_ns=to_encode / nnz * 1e9,
                decode_ns=to_decode / nnz * 1e9,
            )
        )
    return rows


def _limits(step: Step) -> dict[str, float]:
    limits = entropy_limits(step)
    return {
        "limit without the base": limits.without_base,
        "limit given the base": limits.stateless,
    }


def _sizes(rows: Sequence[ChainRow]) -> Any:  # noqa: ANN401 - a rich table
    title = "Bits a changed element, everything counted: the part and its manifest"
    table = report.grid(title, "", *(row.label for row in rows))
    table.add_row("density", *(f"{row.density:.2%}" for row in rows), end_section=True)
    for number, name in enumerate(ENCODINGS):
        cells = (f"{row.encodings[number].bits:.2f}" for row in rows)
        table.add_row(f"deltachain {name}", *cells, style="bold")
    table.add_row("of these, manifest", *(f"{8 * r.manifest_nbytes / r.nnz:.2f}" for r in rows))
    for name in rows[0].layouts:
        table.add_row(name, *(f"{row.layouts[name]:.2f}" for row in rows))
    for name in rows[0].limits:
        table.add_row(name, *(f"{row.limits[name]:.2f}" for row in rows), style="dim")
    return table


def _speeds(rows: Sequence[ChainRow]) -> Any:  # noqa: ANN401 - a rich table
    columns = ("encode GB/s", "ns/change", "decode GB/s", "ns/change")
    table = report.grid("Speed: dense bf16 bytes a second, all digests included", "", *columns)
    for row in rows:
        for e in row.encodings:
            table.add_row(
                f"{e.encoding} {row.label}",
                f"{e.encode_gb_per_s:.1f}",
                f"{e.encode_ns:.1f}",
                f"{e.decode_gb_per_s:.1f}",
                f"{e.decode_ns:.1f}",
            )
    return table


def _draw(rows: Sequence[ChainRow], path: Path) -> None:
    """Plot bits a change by density: encodings as lines, others as markers, limits dashed."""
    plot = report.axes("One update on the wire")
    rows = sorted(rows, key=lambda row: row.density)
    at = [100 * row.density for row in rows]
    for number, name in enumerate(ENCODINGS):
        bits = [row.encodings[number].bits for row in rows]
        plot.plot(at, bits, marker=".", linewidth=2, label=f"deltachain {name}")
    markers = "ovs^Dx+*"
    for number, name in enumerate(rows[0].layouts):
        bits = [row.layouts[name] for row in rows]
        plot.plot(at, bits, markers[number % len(markers)], alpha=0.7, label=name)
    for name, style in zip(rows[0].limits, ("--", ":"), strict=True):
        plot.plot(at, [row.limits[name] for row in rows], style, color="grey", label=name)
    plot.set_xscale("log")
    plot.minorticks_off()
    plot.set_xticks(TICKS, [f"{value:g}" for value in TICKS])
    plot.set_ylim(bottom=0)
    plot.set_xlabel("changed elements, % of all")
    plot.set_ylabel("bits a changed element")
    plot.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    report.save(plot, path)

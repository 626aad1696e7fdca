"""``deltachain diff`` and ``patch``: checkpoints to a delta file and back, without a chain."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, Encode

_CHECKPOINT = "A checkpoint folder, or one safetensors file."


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help=_CHECKPOINT)],
    new: Annotated[Path, typer.Argument(metavar="NEW", help=_CHECKPOINT)],
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The delta file to write.")
    ],
    encoding: Encode = "step",
    as_json: AsJson = False,
) -> None:
    """Write the difference of two checkpoints to a delta file.

    Names, shapes and dtypes of the tensors must be equal. Bits are compared, not numbers.

    Example: `deltachain diff checkpoint-10 checkpoint-20 --out 10-to-20.safetensors`
    """
    from deltachain.checkpoint import write_atomic
    from deltachain.offline import compare

    difference = compare(old, new, encoding)
    write_atomic(out, difference.part.content)
    nnz, nbytes = difference.nnz, len(difference.part.content)
    report: dict[str, Any] = {
        "out": str(out),
        "blake3": difference.part.digest,
        "nbytes": nbytes,
        "tensors": difference.tensors,
        "nnz": nnz,
        "numel": difference.numel,
        "density": nnz / difference.numel if difference.numel else 0.0,
        "bits_per_change": c.bits_per_change(nbytes, nnz),
        "dense_nbytes": difference.nbytes,
        "encodings": list(difference.part.encodings),
    }
    if as_json:
        c.write_json(report)
        return
    ratio = f", 1/{difference.nbytes / nbytes:,.0f} of the checkpoint" if nnz else ""
    bits = report["bits_per_change"]
    each = f", {bits:.2f} bits each" if bits else ""
    _done(
        out,
        f"{c.nbytes(nbytes)}{ratio}",
        f"{c.count(nnz)} of {c.count(difference.numel)} elements changed in "
        f"{difference.tensors:,} tensors, {c.percent(report['density'])}{each}",
    )


def patch(
    base: Annotated[Path, typer.Argument(metavar="BASE", help=_CHECKPOINT)],
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="A delta file.")],
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="NEW", help="The new file, or the new folder for a folder."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Apply a delta file to the checkpoint it was made from.

    Each new tensor is verified against the digests in the delta. A base with other bits at the
    changed elements is refused. The new checkpoint is created atomically; all other bytes and files
    of the base are copied.

    Example: `deltachain patch checkpoint-10 10-to-20.safetensors --out checkpoint-20`
    """
    from deltachain.offline import apply

    applied = apply(base, delta, out)
    report = {"out": str(out), "tensors": applied.tensors, "nnz": applied.nnz}
    if as_json:
        c.write_json(report)
        return
    _done(out, f"{c.count(applied.nnz)} elements written in {applied.tensors:,} tensors, verified")


def _done(out: Path, first: str, *more: str) -> None:
    console = c.out()
    console.print(f"[bold green]✓[/]  {c.clean(str(out))}  {first}", markup=True, soft_wrap=True)
    for line in more:
        console.print(f"   {line}", style="dim")

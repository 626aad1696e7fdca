"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer


class Encoding(StrEnum):
    """How changes are written."""

    STEP = "step"
    OVERWRITE = "overwrite"
    RAW = "raw"


Url: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The chain: a folder, s3://bucket/prefix, hf://buckets/me/bucket, gs://, az://...",
    ),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout, nothing else there.")
]
Encode: TypeAlias = Annotated[
    Encoding,
    typer.Option(
        help="**step** is the smallest; **overwrite** carries new bits instead of steps; **raw** "
        "opens in any safetensors reader."
    ),
]
Base: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where the base checkpoint lies here, if the chain starts from one and it moved.",
    ),
]
Out: TypeAlias = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="DIR", help="A new folder, or one that this chain fills."),
]
Poll: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="S", help="Seconds between looks. Default: what the store bears."),
]

"""Command-line options shared by several commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from deltachain import environment
from deltachain.errors import ConfigError


def secret(name: str, file: Path | None) -> str:
    """Read a secret from a file or the environment, since process lists show option values.

    Args:
        name: Name of the environment variable, without ``DELTACHAIN_``.
        file: File that contains only the secret; a trailing line break is ignored.

    Raises:
        ConfigError: The file cannot be read, or does not contain exactly one line.
    """
    if file is None:
        found: str = environment.read(os.environ).get(name, "")
        return found
    try:
        lines = file.read_text(encoding="utf-8").strip().splitlines()
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or "it is no text"
        raise ConfigError(f"{file}: {why}", hint="name a file that holds one token") from exc
    if len(lines) != 1:
        raise ConfigError(f"{file} has {len(lines)} lines", hint="name a file that holds one token")
    return lines[0]


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
AsJsonLines: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object a version, one a line.")
]
Once: TypeAlias = Annotated[
    bool, typer.Option("--once", help="Update to the current head, then exit.")
]
Encode: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="<step|overwrite|raw|max>",
        help="**step** is the default; **max** is smaller and slower to decode; **overwrite** "
        "carries new bits instead of steps; **raw** "
        "opens in any safetensors reader. Installed packages add more.",
    ),
]
Base: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where the base checkpoint lies here, if the chain starts from one and it moved.",
    ),
]
TrustRemoteCode: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Keep what small files say of code in a repository (auto_map); else it is left out.",
    ),
]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Holds what the replicas' routes ask for. Default: the variable DELTACHAIN_TOKEN.",
    ),
]
KeyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Holds the engines' own API key. Default: the variable DELTACHAIN_ENGINE_KEY.",
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

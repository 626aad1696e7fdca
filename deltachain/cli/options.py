"""Command-line options shared by several commands."""

import math
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from deltachain import environment
from deltachain.errors import ConfigError

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain
    from deltachain.chain.tags import VersionChoice


def secret(name: str, file: Path | None) -> str | Path:
    """Return a file of secrets, or what the variable ``DELTACHAIN_<name>`` says."""
    return file or environment.read_secret(os.environ, name)


Url: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The chain: a folder, s3://bucket/prefix, hf://buckets/me/bucket, gs://, az://...",
    ),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")
]
AsJsonLines: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object a version, one a line.")
]
Once: TypeAlias = Annotated[bool, typer.Option("--once", help="Update to the head, then exit.")]
Encode: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="<step|overwrite|raw|max>",
        help="**step**, the default; **max**, smaller and slower; **overwrite**, new bits instead "
        "of steps; **raw**, for any safetensors reader. Packages add more.",
    ),
]
Base: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of the base checkpoint, if the chain starts from one: a path in the store is "
        "never opened.",
    ),
]
TakeOver: TypeAlias = Annotated[
    bool,
    typer.Option("--take-over", help="Publish although another publisher is at work, and end it."),
]
TrustRemoteCode: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Keep references of small files to code in a repository (auto_map).",
    ),
]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Tokens for the routes of replicas, one a line. Default: DELTACHAIN_TOKEN_FILE, or "
        "the token in DELTACHAIN_TOKEN.",
    ),
]
KeyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The engines' API key. Default: DELTACHAIN_ENGINE_KEY_FILE or the key in "
        "DELTACHAIN_ENGINE_KEY.",
    ),
]
BoardUrls: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--presence",
        metavar="URL",
        help="The DELTACHAIN_PRESENCE_URL of replicas without an address; repeatable.",
    ),
]
Out: TypeAlias = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="DIR", help="A new folder, or one that this chain fills."),
]
Poll: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="S", help="Seconds between polls. Default: 1; 5 for a Hub bucket."),
]
MetricsAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="<PORT|HOST:PORT>",
        help="Serve /metrics, /healthz and /readyz here; without a host, on the loopback.",
    ),
]
AtVersion: TypeAlias = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="The version. Default: the head.")
]
AtStep: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="S", help="The newest version of this trainer step."),
]
TagName: TypeAlias = Annotated[
    str, typer.Option("--tag", metavar="NAME", help="The version with this tag.")
]
At: TypeAlias = Annotated[
    str,
    typer.Option(
        "--at",
        metavar="TIME",
        help="The newest version committed by then: `2026-11-23T09:00`, local unless it names a "
        "zone, or seconds since 1970.",
    ),
]


def opened(url: str, *, writing: bool = False) -> "Chain":
    from deltachain.chain.chain import Chain
    from deltachain.chain.trust import Trust
    from deltachain.store import open_store

    return Chain.open(open_store(url, writer=writing), Trust.of_writer() if writing else None)


def choice_of(
    version: int | None = None, *, step: int | None = None, tag: str = "", at: str = ""
) -> "VersionChoice":
    from deltachain.chain.tags import VersionChoice

    return VersionChoice(version=version, step=step, tag=tag, at=seconds(at) if at else None)


def seconds(text: str) -> float:
    time = math.nan
    with suppress(ValueError, OverflowError, OSError):
        time = datetime.fromisoformat(text).timestamp()
    with suppress(ValueError):
        time = float(text)
    if not math.isfinite(time):
        hint = "write 2026-11-23T09:00:00+01:00, or seconds since 1970"
        raise ConfigError(f"{text!r} is no time", hint=hint)
    return time

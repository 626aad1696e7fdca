"""The app: its commands, and common handling of errors, Ctrl-C and ``--debug``."""

import errno
import os
import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from traceback import format_exception, walk_tb
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

import deltachain
from deltachain import environment
from deltachain.cli.agent import agent
from deltachain.cli.bridge import export, import_
from deltachain.cli.console import out, say_error, say_interrupted, show_warnings
from deltachain.cli.doctor import doctor
from deltachain.cli.estimate import estimate
from deltachain.cli.fleet import fleet
from deltachain.cli.follow import follow
from deltachain.cli.inspect import inspect
from deltachain.cli.keygen import keygen, sign
from deltachain.cli.log import log
from deltachain.cli.maintain import maintain
from deltachain.cli.mirror import mirror
from deltachain.cli.prune import anchor, prune
from deltachain.cli.pull import pull
from deltachain.cli.push import push
from deltachain.cli.revert import revert
from deltachain.cli.stats import stats
from deltachain.cli.tag import tag
from deltachain.cli.verify import verify
from deltachain.errors import ConfigError, DeltaChainError
from deltachain.redact import hidden_parts, redacted_text, redacted_url

EXTRAS: Final = {
    "torch": "torch",
    "transformers": "trl",
    "compressed_tensors": "quantization",
    "trl": "trl",
    "datasets": "trl",
    "accelerate": "trl",
    "huggingface_hub": "hf",
    "boto3": "s3",
    "fsspec": "fsspec",
    "gcsfs": "gcs",
    "adlfs": "azure",
    "cryptography": "signing",
    "xxhash": "bridges",
    "fastapi": "server",
    "starlette": "server",
    "uvicorn": "server",
    "prometheus_client": "server",
}


_FILE_HINTS: Final = {
    errno.ENOENT: "check the path; a file that is to be written needs its folder",
    errno.EEXIST: "something has that name, such as a link to nothing: remove it, or name another",
    errno.EACCES: "check who may read and write there",
    errno.EROFS: "name a folder that can be written to",
    errno.ENOSPC: "free some space, or name a folder on another disk",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOTDIR: "name a folder, not a file",
}


_MEANT: Final = {
    "ls list versions history show head": "`deltachain log URL`, which lists a chain's versions",
    "gc clean cleanup delete rm": "`deltachain prune URL`, which deletes what nobody needs, or "
    "`maintain`",
    "rollback reset checkout undo": "`deltachain revert URL --version N` for all replicas and for "
    "good, or `deltachain fleet rollback --version N ENGINE...` for some, until they are released",
    "status ps replicas top": "`deltachain fleet status ENGINE...` for replicas, or `deltachain "
    "log URL` for a chain",
    "watch": "`deltachain follow URL --out DIR`, or `deltachain fleet status ENGINE... --watch`",
    "subscribe sync": "`deltachain follow URL --out DIR`",
    "download get fetch clone": "`deltachain pull URL --out DIR`",
    "upload publish put": "`deltachain push CHECKPOINT URL`",
    "diff patch apply": "`deltachain push` twice and `pull`; a folder may be the URL",
    "copy cp": "`deltachain mirror SRC DST`",
    "info describe": "`deltachain inspect URL`, or `log`",
    "check fsck": "`deltachain verify URL` for a chain, `doctor` for a machine",
    "dashboard ui web": "`python -m spaces.dashboard URL` in a clone of the repository, or `fleet "
    "status`",
    "version": "`deltachain --version`",
}
MEANT: Final = {name: use for names, use in _MEANT.items() for name in names.split()}
"""What to use, by the name that other programs have for it."""


class Commands(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's own
        """Accept ``--debug`` at any position, since users append it after a failure."""
        end = args.index("--") if "--" in args else len(args)
        if "--debug" in args[:end]:
            args = ["--debug", *(a for a in args[:end] if a != "--debug"), *args[end:]]
        ctx.meta[_WORDS] = args[:end]
        ctx.meta[_SECRETS] = hidden_parts(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - typer's own
        meant = MEANT.get(args[0].lower()) if args and args[0] not in self.commands else None
        if meant is not None:
            raise ConfigError(f"unknown command {args[0]!r}", hint=f"use {meant}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's own
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            ours = environment.PREFIX
            places = [v for n, v in os.environ.items() if "://" in v or n.startswith(ours)]
            secrets = ctx.meta[_SECRETS] | hidden_parts(places)
            if isinstance(error, _USAGE):
                vars(error)["message"] = redacted_text(str(error), secrets)
                raise
            explained = explain(error)
            if explained is None and isinstance(error, OSError):
                raise
            if explained is None or ctx.params.get("debug"):
                sys.stderr.write(redacted_text("".join(format_exception(error)), secrets))
            else:
                explained.args = tuple(redacted_text(str(one), secrets) for one in explained.args)
                explained.hint = redacted_text(explained.hint, secrets)
                say_error(explained, as_json="--json" in ctx.meta[_WORDS])
            raise typer.Exit(explained.exit_code if explained else 1) from error
        except KeyboardInterrupt:
            if ctx.params.get("debug"):
                raise
            say_interrupted()
            raise typer.Exit(130) from None


class Command(TyperCommand):
    """Command whose usage names arguments as the documents do: ``URL``, ``[URL]`` if optional."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401 - typer's own
        return [_plain(piece) for piece in super().collect_usage_pieces(ctx)]


def _plain(piece: str) -> str:
    name, repeated = piece.strip("[]{}."), "..." if "..." in piece else ""
    if piece.startswith("{"):
        return f"{name.upper()}{repeated}"
    return f"[{name}{repeated}]" if piece.startswith("[[") else piece


def explain(error: Exception) -> DeltaChainError | None:
    if isinstance(error, DeltaChainError):
        return error
    if (package := _broken(error)) is not None:
        return ConfigError(
            f"{package} is installed, and cannot be imported: {type(error).__name__}: {error}",
            hint=f"pip install --force-reinstall {package}, then see `deltachain doctor`",
        )
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        hint = f"pip install 'deltachain[{extra}]'"
        return ConfigError(f"{error.name} is not installed", hint=hint) if extra else None
    if isinstance(error, MemoryError):
        said, hint = (
            f"out of memory {error}".strip(),
            "give this process more memory: see ulimit -v",
        )
        return DeltaChainError(said, hint=hint)
    if isinstance(error, OSError) and error.errno != errno.EPIPE:
        said = f"{error.filename or 'a file'}: {error.strerror or error}"
        return DeltaChainError(said, hint=_FILE_HINTS.get(error.errno or 0, ""))
    return None


def _broken(error: Exception) -> str | None:
    for frame, _ in walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and package in EXTRAS:
            return package
    return None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        out().print(f"deltachain {deltachain.__version__}")
        raise typer.Exit


_WORDS: Final = "deltachain.words"  # in the context's meta: words of the command line, up to --
_SECRETS: Final = "deltachain.secrets"  # in the context's meta: parts of words that are not shown
_USAGE: Final = typer.BadParameter.__mro__[2]  # the class of errors that typer shows itself
UNCHECKED: Final = {"doctor", "-h", "--help"}  # with which mistakes in the environment end nothing


@app.callback()
def options(
    context: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Publish changed bits of model weights, and write them into live inference weights."""
    del version, debug
    show_warnings()
    if not UNCHECKED.intersection(context.meta[_WORDS]):
        environment.read(os.environ)


PANELS: Final[dict[str, tuple[Callable[..., None], ...]]] = {
    "Look": (log, inspect, verify, stats, tag, doctor, estimate),
    "Publish and follow": (push, pull, follow, revert, export, import_),
    "Maintain": (maintain, prune, anchor, mirror),
    "Signatures": (keygen, sign),
    "Replicas": (fleet, agent),
}


_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # also of one taken for a path


def local(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that refuses URLs for paths, and expands ``~``, as of ``--out=~/x``."""

    @wraps(command)
    def run(**values: object) -> None:
        paths = {name: path for name, path in values.items() if isinstance(path, Path)}
        for name, path in paths.items():
            if _URL.match(str(path)):
                raise ConfigError(
                    f"{name}={redacted_url(str(path))}: expected a path, found a URL",
                    hint="give a folder or a file; `deltachain pull URL --out DIR` makes a folder "
                    "of a chain",
                )
        command(**(values | {name: Path(os.path.expanduser(paths[name])) for name in paths}))  # noqa: PTH111 - leaves unknown users as they are

    return run


for panel, commands in PANELS.items():
    for command in commands:
        app.command(cls=Command, rich_help_panel=panel)(local(command))

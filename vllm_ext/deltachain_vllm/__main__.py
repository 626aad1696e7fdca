"""``python -m deltachain_vllm``: lead a vLLM server that has only the worker extension."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from contextlib import nullcontext
from typing import Annotated

import typer

from deltachain.errors import ConfigError, DeltaChainError
from deltachain.presence.writer import replica_presence
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain_vllm.beside import BesideEngine

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def main(
    server: Annotated[str, typer.Argument(help="The vLLM server, on this host.")],
    version: Annotated[
        int | None, typer.Option(help="Bring it to this version and end; else it follows.")
    ] = None,
) -> None:
    """Lead a vLLM server along the chain at DELTACHAIN_URL.

    The server has that variable too, DELTACHAIN_STRICT=0, --worker-extension-cls
    deltachain_vllm.WorkerExtension, and VLLM_SERVER_DEV_MODE=1, whose routes are open to every
    client that reaches them.

    Example: `python -m deltachain_vllm http://127.0.0.1:8000`
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("deltachain.replica.target").setLevel(logging.INFO)
    try:
        _lead(server, version)
    except DeltaChainError as exc:
        typer.echo(f"error: {exc}", err=True)
        raise typer.Exit(exc.exit_code) from exc


def _lead(server: str, version: int | None) -> None:
    settings = ReplicaSettings.of(os.environ)
    if settings is None:
        raise ConfigError(
            "DELTACHAIN_URL is not set", hint="name the chain that the server follows"
        )
    engine = BesideEngine(server, pause=settings.pause, keep_cache=settings.keep_cache)
    leader = Leader(settings, engine, takes_over=True)

    def end(number: int, _: object) -> None:
        """Stop after the running update; at a second signal, interrupt it."""
        signal.signal(number, signal.default_int_handler)
        leader.end()

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    try:
        if version is not None:
            leader.update(version)
            typer.echo(f"version {leader.subscriber.version}")
            return
        presence = replica_presence(settings, leader.status, engine=engine.software, place=server)
        with presence or nullcontext():
            for receipt in leader.follow():
                typer.echo(f"{time.strftime('%H:%M:%S')} {receipt}")
    except KeyboardInterrupt:
        sys.stderr.write("stopped in the middle of an update; the next leader finishes it\n")
    finally:
        leader.stop()


if __name__ == "__main__":
    app()

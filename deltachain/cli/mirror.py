"""``deltachain mirror``: copy a chain into another store, and keep it there."""

import dataclasses
import os
import time
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import deltachain
from deltachain import environment
from deltachain.cli import console as c
from deltachain.cli.options import AsJsonLines, MetricsAddress, Poll
from deltachain.cli.serving import end, shown, stopping
from deltachain.errors import ConfigError

if TYPE_CHECKING:
    from deltachain.mirror import MirrorReceipt


def mirror(  # noqa: PLR0913 - one argument an option
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="The chain; with `--promote`, the mirror.")
    ],
    destination: Annotated[
        str | None, typer.Argument(metavar="[DST]", help="An empty store, or this chain's mirror.")
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Keep copying new versions.")] = False,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="<head|N>",
            help="Leave out payloads before the anchor of the head, or of version N.",
        ),
    ] = None,
    promote: Annotated[
        bool,
        typer.Option("--promote", help="End the mirror SRC: publishers may continue its chain."),
    ] = False,
    poll: Poll = None,
    metrics: MetricsAddress = None,
    as_json: AsJsonLines = False,
) -> None:
    """Copy a chain into another store, byte for byte, in the order of dependence.

    Digests are proven first. Ended at any moment, it leaves a readable chain, and the next start
    continues. Publishers refuse the mirror until it is promoted.

    Example: `deltachain mirror s3://policies/run-1 hf://buckets/me/run-1 --follow`

    Example: `deltachain mirror --promote hf://buckets/me/run-1`
    """
    from deltachain.cli.progress import moving
    from deltachain.mirror import Mirror
    from deltachain.mirror import follow as keep
    from deltachain.mirror.mirror import MirrorTotals
    from deltachain.presence.writer import mirror_status
    from deltachain.store import open_store

    if promote:
        _promote(source, destination, as_json=as_json)
        return
    if destination is None:
        raise ConfigError("mirror needs two URLs", hint="deltachain mirror SRC DST")
    begun, given, stop = time.perf_counter(), environment.read(os.environ), Event()
    there, totals, objects, nbytes = open_store(source), MirrorTotals(), 0, 0
    with (
        stopping(stop) as by,
        moving(open_store(destination, writer=True), "mirroring") as (store, planned),
    ):
        copy = Mirror(
            there,
            store,
            start=_start(start),
            writer=f"deltachain {deltachain.__version__}",
            planned=planned,
        )
        receipts = (
            keep(copy, stop=stop, poll_s=poll or there.capabilities.poll_s, looked=totals.looked)
            if follow
            else copy.catch_up(stop)
        )
        with shown(
            metrics,
            partial(totals.figures, copy),
            partial(mirror_status, copy, totals, given, url=there.url),
            place=store.url,
            chains=[source, destination],
            follows=follow,
        ):
            for receipt in receipts:
                totals.count(receipt)
                objects, nbytes = objects + receipt.objects, nbytes + receipt.nbytes
                if as_json:
                    row = dataclasses.asdict(receipt)
                    c.write_json(row | {"lag_versions": receipt.lag_versions})
                elif follow:
                    _show(receipt)
    if not as_json:
        size = f"{objects} objects, {c.nbytes(nbytes)} in {time.perf_counter() - begun:.1f} s"
        left = f"; {len(copy.left_out)} payloads are gone from {source}" if copy.left_out else ""
        held = "no version yet" if copy.version < 0 else f"version {copy.version}"
        c.say(f"{destination}: {held}; {size}{left}", "dim")
    end(by)


def _promote(url: str, other: str | None, *, as_json: bool) -> None:
    from deltachain.mirror import promote
    from deltachain.store import open_store

    if other is not None:
        hint = "deltachain mirror --promote URL"
        raise ConfigError("--promote takes one URL, that of the mirror", hint=hint)
    version = promote(open_store(url, writer=True))
    if as_json:
        c.write_json({"url": url, "version": version})
    else:
        c.out().print(f"{c.clean(url)} is promoted; a publisher may continue after {version}")


def _start(text: str | None) -> int | Literal["head"] | None:
    if text is None or text == "head":
        return "head" if text else None
    if not text.isdecimal():
        raise ConfigError(
            f"--from {text}: expected 'head' or the number of a version",
            hint="`deltachain log SRC` lists the versions",
        )
    return int(text)


def _show(receipt: "MirrorReceipt") -> None:
    behind = f"  {receipt.lag_versions} behind" if receipt.lag_versions else ""
    c.out().print(
        f"version {receipt.version:>5}  {receipt.objects:>3} objects  "
        f"{c.nbytes(receipt.nbytes):>8} copied in {receipt.seconds:.2f} s{behind}",
        soft_wrap=True,
    )

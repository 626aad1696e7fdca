"""``deltachain pull`` and ``follow``: a checkpoint folder at a version, or kept at the head."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs
from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, Base, Url

if TYPE_CHECKING:
    from deltachain.subscribe import ApplyReceipt, Subscriber

Out = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="DIR", help="A new folder, or one that this chain fills."),
]


def pull(
    url: Url,
    *,
    out: Out,
    version: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Which version; else the head.")
    ] = None,
    base: Base = None,
    as_json: AsJson = False,
) -> None:
    """Write a version of a chain into a folder that `from_pretrained` loads.

    A folder that an earlier pull or follow filled is brought up to date, or back, by the cheapest
    plan. Nothing is written before the result is proven. Folders with weights from elsewhere are
    left alone.

    Example: `deltachain pull /mnt/policy --version 7 --out policy-7`
    """
    from deltachain.chain import Chain
    from deltachain.cli.folder import OwnFolder, write_assets
    from deltachain.cli.progress import watching
    from deltachain.store import open_store
    from deltachain.subscribe import SubscribeConfig, Subscriber

    config, folder = SubscribeConfig(url=url, base=base, undo_applies=0), OwnFolder(out)
    with (
        watching(open_store(url), f"pulling into {out.name}") as store,
        Subscriber(config, folder, store=store) as subscriber,
    ):
        folder.refuse_other(Chain.open(store).identity.chain)  # before it is read as this one's
        chain = subscriber.chain  # opening it finds out what the folder holds
        receipt = _bring(subscriber, version)
        written = write_assets(chain, out)
        report = _report(subscriber, receipt, out) | {"files": written}
    if as_json:
        c.write_json(report)
    else:
        _show_pull(report, receipt)


def _bring(subscriber: Subscriber, version: int | None) -> ApplyReceipt | None:
    """Go to a version, forwards or back."""
    held = subscriber.version
    if version is not None and held is not None and version < held:
        subscriber.rollback(version)
        return subscriber.last
    return subscriber.update(version)


def _report(subscriber: Subscriber, receipt: ApplyReceipt | None, out: Path) -> dict[str, Any]:
    held = subscriber.held
    return {
        "url": subscriber.chain.store.url,
        "out": str(out),
        "version": held.version if held else None,
        "state": held.state if held else None,
        "applied": None if receipt is None else _receipt(receipt),
    }


def _receipt(receipt: ApplyReceipt) -> dict[str, Any]:
    return dataclasses.asdict(receipt) | {"state": str(receipt.state)}


def _show_pull(report: dict[str, Any], receipt: ApplyReceipt | None) -> None:
    out = c.out()
    if receipt is None:
        out.print(f"nothing to do: {c.clean(report['out'])} holds version {report['version']}")
        return
    seconds = receipt.fetch_s + receipt.stage_s + receipt.swap_s
    out.print(
        f"[bold green]✓[/]  version {report['version']} in {c.clean(report['out'])}  "
        f"{c.nbytes(receipt.nbytes)} fetched, {seconds:.1f} s  [dim]{report['state'][:8]}[/]",
        markup=True,
        soft_wrap=True,
    )


def follow(  # noqa: PLR0913 - one argument an option
    url: Url,
    *,
    out: Out,
    poll: Annotated[
        float | None,
        typer.Option(metavar="S", help="Seconds between looks. Default: what the store bears."),
    ] = None,
    every_version: Annotated[
        bool, typer.Option("--every-version", help="Stop at each version on the way.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Go to the head as it is now, and end.")
    ] = False,
    base: Base = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line on stdout, one a version.")
    ] = False,
) -> None:
    """Keep a folder at the head of a chain.

    May be started before the trainer. Ctrl-C and SIGTERM end it once the swap that is being made is
    complete; being killed at any moment costs nothing, the next start goes on.

    Example: `deltachain follow /mnt/policy --out policy --poll 5`
    """
    from deltachain.cli.folder import OwnFolder, write_assets
    from deltachain.subscribe import SubscribeConfig, Subscriber

    config = SubscribeConfig(url=url, base=base, poll_s=poll, undo_applies=0)
    stop = Event()
    with Subscriber(config, OwnFolder(out)) as subscriber, _stopping(stop, subscriber) as by:
        receipts = _catch_up if once else _follow
        for receipt in receipts(subscriber, stop, every_version=every_version):
            write_assets(subscriber.chain, out)
            _show_version(receipt, as_json=as_json)
        if not as_json:
            c.say(f"{out} holds version {subscriber.version}", "dim")
    if signal.SIGINT in by:
        raise typer.Exit(130)


def _follow(subscriber: Subscriber, stop: Event, *, every_version: bool) -> Iterator[ApplyReceipt]:
    return subscriber.follow(stop=stop, every_version=every_version)


def _catch_up(
    subscriber: Subscriber, stop: Event, *, every_version: bool
) -> Iterator[ApplyReceipt]:
    """Go to the head as it is now; what is wrong is raised, not waited for."""
    from deltachain.subscribe.history import require

    head = require(subscriber.chain, None).version
    while not stop.is_set():
        held = subscriber.version
        stepwise = every_version and held is not None and held < head
        receipt = subscriber.update(held + 1 if stepwise and held is not None else None)
        if receipt is None:
            return
        yield receipt


def _show_version(receipt: ApplyReceipt, *, as_json: bool) -> None:
    if as_json:
        c.write_json(_receipt(receipt))
        return
    origin = "nothing" if receipt.previous is None else str(receipt.previous)
    behind = f"  {receipt.lag_versions} behind" if receipt.lag_versions else ""
    step = "" if receipt.step is None else f"  step {receipt.step}"
    c.out().print(
        f"version {receipt.version:>5}{step}  [dim]from {origin}[/]  "
        f"{c.count(receipt.nnz):>8} written  {c.nbytes(receipt.nbytes):>8} fetched  "
        f"swap {receipt.swap_s * 1e3:.1f} ms{behind}",
        markup=True,
        soft_wrap=True,
    )


@contextmanager
def _stopping(stop: Event, subscriber: Subscriber) -> Iterator[list[int]]:
    """Let Ctrl-C and SIGTERM end the loop between two swaps; a second one ends it at once."""
    by: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        by.append(number)
        stop.set()
        subscriber.notify()
        if len(by) > 1:
            raise KeyboardInterrupt

    with _handling(signal.SIGINT, handle), _handling(signal.SIGTERM, handle):
        yield by


@contextmanager
def _handling(
    number: signal.Signals, handle: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)

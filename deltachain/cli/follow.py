"""``deltachain follow``: keep a checkpoint folder at the head."""

import dataclasses
from collections.abc import Iterator
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltachain.cli import console as c
from deltachain.cli import options
from deltachain.cli.serving import end, shown_follower, stopping

if TYPE_CHECKING:
    from deltachain.errors import DeltaChainError
    from deltachain.subscribe import ApplyReceipt, Subscriber


def follow(  # noqa: PLR0913 - one argument an option
    url: options.Url,
    *,
    out: options.Out,
    poll: options.Poll = None,
    every_version: Annotated[
        bool, typer.Option("--every-version", help="Apply each version separately.")
    ] = False,
    once: options.Once = False,
    base: options.Base = None,
    trust_remote_code: options.TrustRemoteCode = False,
    metrics: options.MetricsAddress = None,
    as_json: options.AsJsonLines = False,
) -> None:
    """Keep a folder at the head of a chain.

    May start before the trainer. Ctrl-C and SIGTERM end it after the current swap; after a crash or
    kill the next start continues.

    Example: `deltachain follow /mnt/policy --out policy --poll 5`

    Example: `deltachain follow /mnt/policy --out policy --metrics 9095`
    """
    from deltachain.subscribe import SubscribeConfig, Subscriber
    from deltachain.subscribe.targets.folder import BUDGET, OwnFolder, write_assets

    config = SubscribeConfig(url=url, base=base, poll_s=poll, undo_applies=0, stage_budget=BUDGET)
    stop = Event()
    with Subscriber(config, OwnFolder(out)) as subscriber, stopping(stop, subscriber.notify) as by:
        with shown_follower(
            subscriber, metrics, engine="follow", place=str(out.resolve()), follows=not once
        ) as looked:
            complete_at: int | None = None

            def complete() -> None:
                """Write the small files; a process killed after a swap may have left them out."""
                nonlocal complete_at
                if subscriber.version not in (None, complete_at):
                    write_assets(subscriber.chain, out, trusted=trust_remote_code)
                    complete_at = subscriber.version

            def after_look(trouble: "DeltaChainError | None") -> None:
                if trouble is None:
                    complete()
                looked(trouble)

            receipts = (
                catch_up(subscriber, stop, every_version=every_version)
                if once
                else subscriber.follow(stop=stop, every_version=every_version, looked=after_look)
            )
            for receipt in receipts:
                complete()
                show_version(receipt, as_json=as_json)
            if once:
                complete()
        if not as_json:
            c.say(f"{out} holds {held(subscriber.version)}", "dim")
    end(by)


def catch_up(
    subscriber: "Subscriber", stop: Event, *, every_version: bool
) -> "Iterator[ApplyReceipt]":
    """Update to the current head; raise errors instead of retrying."""
    from deltachain.subscribe.history import require

    head = require(subscriber.chain, None).version
    while not stop.is_set():
        held = subscriber.version
        stepwise = every_version and held is not None and held < head
        receipt = subscriber.update(held + 1 if stepwise and held is not None else None)
        if receipt is None:
            return
        yield receipt


def held(version: int | None) -> str:
    return "no version: the chain had none yet" if version is None else f"version {version}"


def receipt_row(receipt: "ApplyReceipt") -> dict[str, Any]:
    return dataclasses.asdict(receipt) | {"state": str(receipt.state)}


def show_version(receipt: "ApplyReceipt", *, as_json: bool) -> None:
    if as_json:
        c.write_json(receipt_row(receipt))
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

"""``deltachain agent``: a sidecar that makes a stock server follow a chain."""

from threading import Event
from typing import Annotated

import typer

from deltachain.cli import console as c
from deltachain.cli import options
from deltachain.cli.follow import held, show_version
from deltachain.cli.serving import end, shown_follower, stopping


def agent(  # noqa: PLR0913 - one argument an option
    url: options.Url,
    *,
    engine: Annotated[
        str, typer.Option(metavar="URL", help="Address of the server, which must see --out.")
    ],
    out: options.Out,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Treat the chain as a LoRA adapter: load version 7 into vLLM as NAME-v7.",
        ),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="Adapters to keep loaded.")] = 2,
    key_file: options.KeyFile = None,
    poll: options.Poll = None,
    once: options.Once = False,
    base: options.Base = None,
    trust_remote_code: options.TrustRemoteCode = False,
    metrics: options.MetricsAddress = None,
    as_json: options.AsJsonLines = False,
) -> None:
    """Run a sidecar that makes a stock vLLM or SGLang server reload each version.

    Fetches and verifies each version in a folder while the server serves; then pauses it, loads the
    whole checkpoint, and resumes. vLLM must run in development mode. Adapters are loaded without a
    pause, with the version in their name. Waits for a server that is down; a restarted one reloads.

    Example: `deltachain agent /mnt/policy --engine http://127.0.0.1:8000 --out policy`

    Example: `deltachain agent /mnt/lora --engine http://127.0.0.1:8000 --out loras --adapter pi`
    """
    from deltachain.control.agent import AdapterServer, Agent, ReloadServer
    from deltachain.subscribe import SubscribeConfig

    config = SubscribeConfig(
        url=url, base=base, poll_s=poll, undo_applies=0, trust_remote_code=trust_remote_code
    )
    key = options.secret("ENGINE_KEY", key_file)
    folder, stop = out / "head" if adapter else out, Event()
    server = (
        AdapterServer(engine, name=adapter, folder=out, key=key, keep=keep)
        if adapter
        else ReloadServer(engine, key=key)
    )
    with (
        Agent(config, folder, server) as led,
        shown_follower(
            led.subscriber,
            metrics,
            engine="agent",
            place=str(out.resolve()),
            follows=not once,
            why_unready=led.why_unready,
        ) as looked,
        stopping(stop, led.subscriber.notify) as by,
    ):
        if once:
            receipt = led.update()
            if receipt is not None:
                show_version(receipt, as_json=as_json)
        else:
            for receipt in led.follow(stop, looked=looked):
                show_version(receipt, as_json=as_json)
        if not as_json:
            c.say(f"{engine} holds {held(led.subscriber.version)}", "dim")
    end(by)

"""``python -m spaces.dashboard``: serve a web page of a chain and its replicas."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
import os
import socket
import sys
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Final

import typer

from deltachain import environment
from deltachain.cli import console as c
from deltachain.cli.app import Command, Commands, local, options
from deltachain.cli.options import BoardUrls, KeyFile, Poll, TokenFile, Url, secret
from deltachain.cli.serving import end, stopping
from deltachain.errors import ConfigError

QUESTION_S: Final = 5.0  # timeout of a question to a replica, in seconds


def dashboard(  # noqa: PLR0913 - one argument an option
    url: Url,
    *,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Address of a replica, or dns://NAME:PORT for all addresses of a name; "
            "repeatable. Default: DELTACHAIN_ENGINES.",
        ),
    ] = None,
    presence: BoardUrls = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="<PORT|HOST:PORT>",
            help="Address of the page; without a host, for this machine alone. Port 0 takes a free "
            "one.",
        ),
    ] = "9096",
    max_lag: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Lag, in versions, above which a replica is an alert."
        ),
    ] = 8,
    max_silence: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="S",
            help="Seconds without an answer of a replica, or of its store, until it is an alert. "
            "Default: DELTACHAIN_MAX_SILENCE_S, or 60.",
        ),
    ] = None,
    poll: Poll = None,
    token_file: TokenFile = None,
    key_file: KeyFile = None,
) -> None:
    """Serve a web page of a chain: its versions, its replicas, and their faults.

    Reads only, every manifest once. The page asks for the token of the replicas; without one it is
    served to this machine alone. Ends with Ctrl-C or SIGTERM.

    Example: `python -m spaces.dashboard /mnt/policy`

    Example: `python -m spaces.dashboard s3://bucket/run-1 --presence s3://bucket/run-1-replicas`

    Example: `python -m spaces.dashboard /mnt/policy --engine http://a:8000 --engine http://b:30000`
    """
    import uvicorn

    from deltachain.control.replica_client import ReplicaClient
    from deltachain.control.roster import Roster, parse_inventory, split_boards, split_entries
    from deltachain.presence.record import PresenceBoard
    from deltachain.status import HealthLimits
    from deltachain.store import open_store
    from spaces.dashboard.app import create_app, limited
    from spaces.dashboard.chain_index import ChainIndex
    from spaces.dashboard.watcher import Watcher

    given = environment.read(os.environ)
    token, key = secret("TOKEN", token_file), secret("ENGINE_KEY", key_file)
    silence_s = max_silence or given.get("MAX_SILENCE_S", 60.0)
    listed = "" if engine or presence else given.get("ENGINES", "")
    asked, stores = split_boards(parse_inventory(listed) if listed else engine or ())
    unique, names = split_entries(asked)
    addresses = unique if listed else [one for one in asked if one not in names]
    clients = [ReplicaClient(one, token=token, key=key, timeout_s=QUESTION_S) for one in addresses]
    rosters = [Roster([name], token=token, key=key, timeout_s=QUESTION_S) for name in names]
    boards = [PresenceBoard(one) for one in (*stores, *(presence or ()))]
    with closing(open_store(url)) as store, closing(_bound(listen, token)) as server:
        poll_s = poll or store.capabilities.poll_s
        limits = HealthLimits(lag=max_lag, silence_s=silence_s)
        with Watcher(
            ChainIndex(store), clients, boards=boards, names=rosters, poll_s=poll_s, limits=limits
        ) as watcher:
            config = uvicorn.Config(
                create_app(watcher, token=token),
                log_level="warning",
                access_log=False,
                server_header=False,
                http=limited(),
                timeout_graceful_shutdown=1,
            )
            service = uvicorn.Server(config)

            def leave() -> None:
                service.should_exit = True

            # uvicorn handles signals itself while it serves, and sends them again when it is done.
            with stopping(Event(), leave) as by:
                c.say(f"dashboard of {store.url} at {_address(server)}")
                service.run(sockets=[server])
    end(by)


def _bound(listen: str, token: str | Path) -> socket.socket:
    """Bind the socket that the page is served at: others may connect to it with a token alone."""
    from deltachain.control.access import LOOPBACK
    from deltachain.metrics import parse_address

    host, port = parse_address(listen)
    if host not in LOOPBACK and not token:
        raise ConfigError(
            f"a dashboard at {host} needs a token",
            hint="set DELTACHAIN_TOKEN or --token-file, or leave out the host to serve this "
            "machine alone",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as exc:
        raise ConfigError(
            f"the dashboard cannot be served at {host}:{port}: {exc.strerror or exc}",
            hint="name a free port, or 0 for any",
        ) from exc


def _address(server: socket.socket) -> str:
    host, port = server.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


NAME: Final = "spaces.dashboard"


class Program(Commands):
    """The only command, which nobody names: its name is the last word of the program's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's own
        return super().parse_args(ctx, [NAME, *args])


app = typer.Typer(
    cls=Program,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(options)
app.command(NAME, cls=Command)(local(dashboard))


def main() -> None:
    c.print_in_any_encoding()
    try:
        app(prog_name="python -m")
    except KeyboardInterrupt:
        c.say_interrupted()
        sys.exit(130)


if __name__ == "__main__":
    main()

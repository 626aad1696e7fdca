"""``deltachain export`` and ``import``: a chain as files of other systems, and the reverse."""

from pathlib import Path
from threading import Event
from typing import Annotated, TypeAlias

import typer

from deltachain.cli import console as c
from deltachain.cli import options
from deltachain.cli.follow import catch_up
from deltachain.cli.serving import end, stopping

DialectName: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="<trl|trl-v1|slime|skyrl|modelexpress|checkpoint>",
        help="Layout of the files: **trl**, its deltas with gaps, **trl-v1** with indices; "
        "**slime**, which is miles' too; **checkpoint**, a whole one a version.",
    ),
]
FilesUrl: TypeAlias = Annotated[
    str, typer.Argument(metavar="DIR", help="The folder of the files, or a URL as of a chain.")
]
Follow: TypeAlias = Annotated[
    bool, typer.Option("--follow", help="Go on with later versions until Ctrl-C or SIGTERM.")
]


def export(  # noqa: PLR0913 - one argument an option
    url: options.Url,
    out: FilesUrl,
    *,
    dialect: DialectName,
    follow: Follow = False,
    full_every: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Write versions that N divides in full, for late receivers. Default: the first.",
        ),
    ] = 0,
    poll: options.Poll = None,
    base: options.Base = None,
    as_json: options.AsJsonLines = False,
) -> None:
    """Write versions of a chain as files for receivers of another system.

    The first run writes the head in full, later ones the changes since. A line is printed once a
    version is whole: then tell the receivers, which start from the full version.

    Example: `deltachain export /mnt/policy /mnt/weights --dialect slime --follow`

    Example: `deltachain export s3://rl/policy hf://buckets/me/trl --dialect trl --full-every 100`
    """
    from deltachain.bridges import dialect_of
    from deltachain.bridges.export import Exporter, HostCopy
    from deltachain.store import open_store
    from deltachain.subscribe import SubscribeConfig, Subscriber

    layout = dialect, dialect_of(dialect)
    config = SubscribeConfig(url=url, base=base, poll_s=poll, undo_applies=0)
    stop = Event()
    with Subscriber(config, HostCopy()) as subscriber, stopping(stop, subscriber.notify) as by:
        exporter = Exporter(subscriber, open_store(out), layout, full_every=full_every)
        for receipt in (
            subscriber.follow(stop=stop, every_version=True)
            if follow
            else catch_up(subscriber, stop, every_version=True)
        ):
            done = exporter.write(receipt.version)
            if as_json:
                c.write_json(c.fields(done, *done.__struct_fields__))
            else:
                kind = "full" if done.full else "changes"
                c.done(f"version {done.version}  {kind}  {c.nbytes(done.nbytes)}  {done.key}")
    end(by)


def import_(  # noqa: PLR0913 - one argument an option
    files: FilesUrl,
    url: options.Url,
    *,
    dialect: DialectName,
    follow: Follow = False,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The checkpoint that is version 0, if the files have none."
        ),
    ] = None,
    assets: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the configuration and tokenizer files."),
    ] = None,
    encoding: options.Encode = "step",
    poll: options.Poll = None,
    take_over: options.TakeOver = False,
    as_json: options.AsJsonLines = False,
) -> None:
    """Publish versions from files of another system's trainer.

    Begins with the newest full version, then takes each number, which becomes the trainer step; a
    restart continues after the chain's head. A version's files are all read and proven before it is
    published.

    Example: `deltachain import /mnt/weights /mnt/policy --dialect slime --base Qwen3-8B --follow`

    Example: `deltachain import out /mnt/policy --dialect checkpoint --assets out/checkpoint-40`
    """
    from deltachain.bridges import dialect_of
    from deltachain.bridges.imports import Importer
    from deltachain.publish import PublishConfig
    from deltachain.store import open_store

    config = PublishConfig(url=url, assets=assets, encoding=encoding, take_over=take_over)
    stop = Event()
    importer = Importer(open_store(files), dialect_of(dialect), config, base=base)
    with importer, stopping(stop) as by:
        for receipt in importer.follow(stop, poll) if follow else importer.versions():
            if as_json:
                c.write_json(c.fields(receipt, "version", "step", "kind", "nnz", "nbytes"))
            else:
                size = f"{c.count(receipt.nnz)} changed  {c.nbytes(receipt.nbytes)}"
                c.done(f"version {receipt.version}  number {receipt.step}  {size}")
    end(by)


import_.__name__ = "import"  # the command; to Python it is a keyword

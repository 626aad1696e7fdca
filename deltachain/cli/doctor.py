"""``deltachain doctor``: find what keeps a publisher or a follower from working."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from deltachain.cli import console as c
from deltachain.cli.options import AsJson
from deltachain.doctor import Grade, Role

if TYPE_CHECKING:
    from deltachain.doctor import Finding

_STYLES: Final = {Grade.OK: "green", Grade.NOTE: "yellow", Grade.FAULT: "bold red"}


def doctor(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The chain. Default: DELTACHAIN_URL.")
    ] = "",
    *,
    role: Annotated[
        Role,
        typer.Option(
            "--as",
            help="Role of this machine. **publisher** writes trial objects to the store, "
            "**follower** to DELTACHAIN_PRESENCE_URL alone.",
        ),
    ] = Role.FOLLOWER,
    as_json: AsJson = False,
) -> None:
    """Find faults that keep a publisher or a follower from working on this machine.

    Checks environment variables and their files, packages, engines and plugins, TLS and proxies,
    the store, its clock and the chain, and how a start would end. Exits with 1 if it finds a fault;
    a note may be intended.

    Example: `deltachain doctor s3://policies/run-1`

    Before training: `deltachain doctor s3://policies/run-1 --as publisher`
    """
    from deltachain.doctor.examine import examine

    found = []
    for finding in examine(url, role):
        found.append(finding)
        if not as_json:
            _show(finding)
    faults = sum(finding.grade is Grade.FAULT for finding in found)
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in found]
        c.write_json({"role": role, "faults": faults, "findings": rows})
    else:
        said = c.plural(faults, "fault") if faults else "no fault"
        c.out().print(Text(f"\n{said}, as a {role}", "bold"))
    if faults:
        raise typer.Exit(1)


def _show(finding: "Finding") -> None:
    text = Text.assemble(
        (f"{finding.grade:<6}", _STYLES[finding.grade]),
        (f"{finding.check:<12}", "dim"),
        c.clean(finding.said),
    )
    if finding.hint:
        text.append_text(Text.assemble((f"\n{'':<6}{'hint':<12}", "dim"), c.clean(finding.hint)))
    c.out().print(text, soft_wrap=True)

"""A chain as files of other systems, and their files as a chain."""

from typing import Final

from deltachain.bridges.dialect import Dialect
from deltachain.bridges.files import CheckpointDialect
from deltachain.bridges.skyrl import SkyRLDialect
from deltachain.bridges.slime import MODELEXPRESS, SLIME
from deltachain.bridges.trl import TRLDialect
from deltachain.errors import ConfigError

DIALECTS: Final[dict[str, Dialect]] = {
    "trl": TRLDialect(),
    "trl-v1": TRLDialect(absolute=True),
    "slime": SLIME,
    "skyrl": SkyRLDialect(),
    "modelexpress": MODELEXPRESS,
    "checkpoint": CheckpointDialect(),
}
"""Layouts of files by the name of their system."""


def dialect_of(name: str) -> Dialect:
    if name not in DIALECTS:
        raise ConfigError(
            f"dialect {name!r}: expected one of {', '.join(DIALECTS)}",
            hint="name the system that reads or writes the files; miles writes as slime",
        )
    return DIALECTS[name]

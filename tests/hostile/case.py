"""One hostile object: what it is, how it is made, and what must become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from deltachain.errors import DeltaChainError, MalformedError
from tests.hostile.scene import Scene

Level = Literal["part", "manifest", "record", "table", "chain", "head"]
Category = Literal[
    "truncated",
    "overlapping",
    "oversized",
    "out of range",
    "unsorted",
    "duplicate",
    "wrong type",
    "bomb",
    "path",
    "lying size",
    "requires",
    "wrong digest",
    "another rule",
]

ORDERED: Final[frozenset[Level]] = frozenset(("part", "manifest", "record"))
"""Levels that have anything whose order is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A forgery in a chain that is sound otherwise.

    Attributes:
        level: What is forged.
        category: In which way.
        name: What is wrong with it.
        act: Forges it, in a scene whose follower holds version 0.
        error: What the follower must raise; ``None``: it gets to the head all the same.
        at: The object that the error names, by level; empty where it is about a version.
        scene: Which chain: the name of a part, or ``record``.
        opens: The follower is a new one, which has not read the chain yet.
        assets: The small files of the chain are taken, instead of a version.
        poisons: The follower cannot tell who is wrong, and does not trust its target any more.
    """

    level: Level
    category: Category
    name: str
    act: Callable[[Scene], object]
    error: type[DeltaChainError] | None = MalformedError
    at: Level | Literal["", "asset"] = ""
    scene: str = "step"
    opens: bool = False
    assets: bool = False
    poisons: bool = False

    @property
    def id(self) -> str:
        return f"{self.level}: {self.category}: {self.name}"

"""Generated text: short stories and sums, and questions whose answers can be scored.

All text is determined by a seed, so that processes with equal seeds generate equal text. A document
is one line; a question is the beginning of a line, so that a model trained on documents can answer.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import numpy as np

T = TypeVar("T")

Dice: TypeAlias = np.random.Generator

NAMES: Final = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "June", "Kai")
THINGS: Final = ("apples", "books", "coins", "drums", "eggs", "flags", "keys", "lamps", "shells")
SIZES: Final = ("small", "large", "tiny", "heavy", "light", "long", "round", "flat")
COLOURS: Final = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")
WALKERS: Final = ("robot", "sailor", "farmer", "fox", "baker", "crow", "painter", "child", "goat")
LOADS: Final = ("basket", "stone", "ladder", "barrel", "letter", "wheel", "blanket", "bell")
PLACES: Final = ("river", "market", "tower", "bridge", "garden", "harbour", "forest", "mill")
GAINS: Final = ("finds", "buys", "picks up", "is given")
LOSSES: Final = ("loses", "sells", "drops", "gives away")
CARRIES: Final = ("carries", "drags", "brings", "takes", "rolls")

LARGEST: Final = 5

_NUMBER_FIRST: Final = re.compile(r"\s*(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: str
    answer: int

    @property
    def line(self) -> str:
        return f"{self.prompt}{self.answer}"


def documents(seed: int) -> Iterator[str]:
    dice = np.random.default_rng(seed)
    while True:
        yield _pick(dice, _KINDS)(dice)


def questions(count: int, *, seed: int) -> list[Question]:
    dice = np.random.default_rng(seed)
    return [_question(dice) for _ in range(count)]


def score(completion: str, answer: int) -> float:
    """Score a completion from 0 (no leading number) to 1 (the answer alone).

    A wrong number scores higher the nearer it is, and text after the number lowers the score, so
    that completions of one prompt rarely have equal scores, which would give no gradient.
    """
    found = _NUMBER_FIRST.match(completion)
    if found is None:
        return 0.0
    distance = abs(int(found.group(1)) - answer)
    nearness = 1.0 if distance == 0 else 0.5 / (1 + distance)
    rambling = min(len(completion[found.end() :].strip()), 10) / 10
    return nearness * (1.0 - 0.5 * rambling)


def _pick(dice: Dice, options: Sequence[T]) -> T:
    return options[int(dice.integers(len(options)))]


def _number(dice: Dice, largest: int = LARGEST) -> int:
    return int(dice.integers(largest + 1))


def _question(dice: Dice) -> Question:
    first, second = _number(dice), _number(dice)
    if dice.random() < 0.7:
        return Question(prompt=f"add {first} and {second}: ", answer=first + second)
    first, second = max(first, second), min(first, second)
    return Question(prompt=f"take {second} from {first}: ", answer=first - second)


def _sum(dice: Dice) -> str:
    return _question(dice).line


def _shopping(dice: Dice) -> str:
    name, thing, held, moved = _pick(dice, NAMES), _pick(dice, THINGS), _number(dice), _number(dice)
    if dice.random() < 0.5:
        return (
            f"{name} has {held} {thing} and {_pick(dice, GAINS)} {moved}. "
            f"now {name} has {held + moved} {thing}."
        )
    held, moved = max(held, moved), min(held, moved)
    return (
        f"{name} has {held} {thing} and {_pick(dice, LOSSES)} {moved}. "
        f"now {name} has {held - moved} {thing}."
    )


def _journey(dice: Dice) -> str:
    start = _pick(dice, PLACES)
    goal = _pick(dice, [place for place in PLACES if place != start])
    return (
        f"the {_pick(dice, SIZES)} {_pick(dice, WALKERS)} {_pick(dice, CARRIES)} "
        f"a {_pick(dice, COLOURS)} {_pick(dice, LOADS)} from the {start} to the {goal}."
    )


def _counting(dice: Dice) -> str:
    start = _number(dice, 15)
    return "count: " + " ".join(str(start + offset) for offset in range(5))


_KINDS: Final[tuple[Callable[[Dice], str], ...]] = (
    _sum,
    _sum,
    _sum,
    _shopping,
    _journey,
    _counting,
)

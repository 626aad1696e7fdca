"""Rules of the game: a hidden word, four guesses, feedback by letter; pure functions."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

LENGTH: Final = 5

TURNS: Final = 4
PROMPT: Final = "guess:"

GREEN: Final = "g"
YELLOW: Final = "y"
ABSENT: Final = "."
UNKNOWN: Final = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """State of a game."""

    hidden: str
    turns_left: int = TURNS
    won: bool = False
    worth: float = 0.0

    @property
    def done(self) -> bool:
        return self.won or self.turns_left == 0

    @property
    def reward(self) -> float:
        if not self.done:
            return 0.0
        if self.won:
            return (10 - (TURNS - self.turns_left - 1)) / 10
        return self.worth / (TURNS * LENGTH) / 2


def secret_of(seed: int, words: Sequence[str]) -> str:
    digest = hashlib.sha256(str(seed).encode()).digest()
    return words[int.from_bytes(digest, "big") % len(words)]


def marks_of(guess: str, secret: str) -> str:
    """Return the feedback on a guess."""
    left = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    marks = []
    for g, s in zip(guess, secret, strict=True):
        if g == s:
            marks.append(GREEN)
        elif left[g]:
            left[g] -= 1
            marks.append(YELLOW)
        else:
            marks.append(ABSENT)
    return "".join(marks)


def play(game: Game, word: str, words: frozenset[str]) -> tuple[Game, str]:
    """Apply a guess to a game that is not over."""
    guess = word.strip().lower()
    after = replace(game, turns_left=game.turns_left - 1)
    marks = UNKNOWN
    if guess in words:
        marks = marks_of(guess, game.hidden)
        worth = marks.count(GREEN) + marks.count(YELLOW) / 2
        after = replace(after, won=guess == game.hidden, worth=game.worth + worth)
    return after, f" = {' '.join(marks)}\n{'' if after.done else PROMPT}"

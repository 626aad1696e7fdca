"""The rules: a hidden word, four guesses, feedback letter by letter; no clock, no files."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

LENGTH: Final = 5
"""Letters of a word."""

TURNS: Final = 4
PROMPT: Final = "guess:"

GREEN: Final = "g"
YELLOW: Final = "y"
ABSENT: Final = "."
UNKNOWN: Final = "?"
"""Feedback on a guess that is not in the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """Where a game stands.

    Attributes:
        hidden: The word to be found.
        turns_left: Guesses that may still be made.
        won: Whether the last guess was the secret.
        worth: What all guesses so far were worth, a green letter 1 and a yellow one half.
    """

    hidden: str
    turns_left: int = TURNS
    won: bool = False
    worth: float = 0.0

    @property
    def done(self) -> bool:
        """Whether no guess is left to be made."""
        return self.won or self.turns_left == 0

    @property
    def reward(self) -> float:
        """Nothing before the end; then at most 1, and more than half only for who won."""
        if not self.done:
            return 0.0
        if self.won:
            return (10 - (TURNS - self.turns_left - 1)) / 10
        return self.worth / (TURNS * LENGTH) / 2


def secret_of(seed: int, words: Sequence[str]) -> str:
    """The word that a seed stands for, the same on every machine and in every release of Python."""
    digest = hashlib.sha256(str(seed).encode()).digest()
    return words[int.from_bytes(digest, "big") % len(words)]


def marks_of(guess: str, secret: str) -> str:
    """Feedback on a guess.

    A letter is marked as often as the secret has it at most: where it is right first, then from
    the left.
    """
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
    """Make a guess in a game that is not done.

    Args:
        game: Before it.
        word: As it was typed.
        words: What may be guessed; another word costs a turn all the same.

    Returns:
        The game after it, and what the player reads.
    """
    guess = word.strip().lower()
    after = replace(game, turns_left=game.turns_left - 1)
    marks = UNKNOWN
    if guess in words:
        marks = marks_of(guess, game.hidden)
        worth = marks.count(GREEN) + marks.count(YELLOW) / 2
        after = replace(after, won=guess == game.hidden, worth=game.worth + worth)
    return after, f" = {' '.join(marks)}\n{'' if after.done else PROMPT}"

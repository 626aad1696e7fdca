"""Games of a careless player, to pretrain on: half of the words it tries are made up.

It knows what a game looks like, and not which words there are. That, and to use what it was told,
is left to reinforcement learning.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

import numpy as np

import deltachain
from deltachain.errors import ConfigError

ENVIRONMENT: Final = Path(deltachain.__file__).parents[1] / "spaces" / "environment"
"""The folder of the game's server: a Space of its own, of which a clone has the source."""

MADE_UP: Final = 0.5


def environment_folder() -> Path:
    """Where the game's server lies.

    Raises:
        ConfigError: This is an installed package, which has no Spaces.
    """
    if not (ENVIRONMENT / "server.py").is_file():
        raise ConfigError(
            f"{ENVIRONMENT} is not there", hint="run this from a clone of the repository"
        )
    return ENVIRONMENT


def read_words() -> list[str]:
    """The words that may be guessed."""
    return (environment_folder() / "words.txt").read_text(encoding="utf-8").split()


def transcripts(seed: int) -> Iterator[str]:
    """Games without end, each of several lines."""
    rules, words = _rules(), read_words()
    tried = [*words, *_made_up(words)]
    chances = np.repeat([1 - MADE_UP, MADE_UP], len(words)) / len(words)
    known, dice = frozenset(words), np.random.default_rng(seed)
    while True:
        game = rules.Game(hidden=words[int(dice.integers(len(words)))])
        text = rules.PROMPT
        while not game.done:
            word = tried[int(dice.choice(len(tried), p=chances))]
            game, seen = rules.play(game, word, known)
            text += f" {word}{seen}"
        yield text


def _made_up(words: Sequence[str]) -> list[str]:
    """As many words that are none: the same letters, the other way round."""
    there = set(words)
    return [w[::-1] if w[::-1] not in there else w[1:] + w[0] for w in words]


def _rules() -> ModuleType:
    """The rules as the server has them; its folder is no package."""
    file = environment_folder() / "game.py"
    spec = importlib.util.spec_from_file_location("deltachain_game", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be loaded")
    rules = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = rules  # dataclasses look for the module they are made in
    spec.loader.exec_module(rules)
    return rules

"""Transcripts of simulated games for pretraining; half of the guesses are invalid words."""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

import numpy as np

from deltachain.errors import ConfigError

ENVIRONMENT: Final = Path(__file__).parents[3] / "spaces" / "environment"

MADE_UP: Final = 0.5


def read_words() -> list[str]:
    return (ENVIRONMENT / "words.txt").read_text(encoding="utf-8").split()


def transcripts(seed: int) -> Iterator[str]:
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
    there = set(words)
    return [w[::-1] if w[::-1] not in there else w[1:] + w[0] for w in words]


def _rules() -> ModuleType:
    file = ENVIRONMENT / "game.py"
    spec = importlib.util.spec_from_file_location("deltachain_game", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be loaded")
    rules = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = rules  # dataclasses look up their module there
    spec.loader.exec_module(rules)
    return rules

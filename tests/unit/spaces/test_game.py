from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from game import LENGTH, TURNS, Game, marks_of, play, secret_of
from server import WORDS, read_words

LIST = read_words(WORDS)
KNOWN = frozenset(LIST)

# Few letters, so that most words have some twice.
crowded = st.text("abc", min_size=LENGTH, max_size=LENGTH)
listed = st.sampled_from(LIST)
typed = st.one_of(listed, st.text(max_size=8))


@given(crowded, crowded)
def test_green_says_that_a_letter_is_right(guess: str, secret: str) -> None:
    marks = marks_of(guess, secret)
    assert [m == "g" for m in marks] == [g == s for g, s in zip(guess, secret, strict=True)]


@given(crowded, crowded)
def test_a_letter_is_marked_as_often_as_both_words_have_it(guess: str, secret: str) -> None:
    marked = Counter(
        letter for letter, mark in zip(guess, marks_of(guess, secret), strict=True) if mark != "."
    )
    assert marked == Counter(guess) & Counter(secret)


@given(crowded, crowded)
def test_of_equal_letters_the_first_are_yellow(guess: str, secret: str) -> None:
    marks = marks_of(guess, secret)
    for letter in set(guess):
        misplaced = [m for g, m in zip(guess, marks, strict=True) if g == letter and m != "g"]
        assert "".join(misplaced) == "".join(sorted(misplaced, reverse=True))


@given(listed, st.lists(typed, min_size=TURNS, max_size=TURNS))
def test_a_game_ends_by_the_secret_or_after_four_turns(secret: str, guesses: list[str]) -> None:
    game, worth = Game(hidden=secret), 0.0
    for turn, word in enumerate(guesses, 1):
        game, observation = play(game, word, KNOWN)
        guess = word.strip().lower()
        if guess in KNOWN:
            marks = marks_of(guess, secret)
            worth += (marks.count("g") + 0.5 * marks.count("y")) / 5
        else:
            marks = "?"
        assert observation == f" = {' '.join(marks)}\n" + ("" if game.done else "guess:")
        assert (game.turns_left, game.done) == (TURNS - turn, guess == secret or turn == TURNS)
        if guess == secret:
            assert game.reward == pytest.approx(1.0 - 0.1 * (turn - 1))
            return
        assert game.reward == pytest.approx(worth / 4 / 2 if game.done else 0.0)
    assert game.done


def test_who_wins_late_has_more_than_who_nearly_did() -> None:
    rewards = [Game(hidden="crane", turns_left=left, won=True).reward for left in (3, 2, 1, 0)]
    assert rewards == [1.0, 0.9, 0.8, 0.7]
    assert Game(hidden="crane", turns_left=0, worth=16.0).reward == 0.4


def test_seeds_mean_the_same_for_ever() -> None:
    assert [secret_of(seed, LIST) for seed in range(4)] == ["paper", "dance", "smile", "eagle"]


@pytest.mark.parametrize("text", ["", "\n", "crane\ncran\n", "Crane\n", "cr4ne\n", "crâne\n"])
def test_a_list_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "words"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="words"):
        read_words(file)

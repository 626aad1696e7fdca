from itertools import islice

import pytest

from examples.demo.corpus import documents, questions, score


def test_the_same_seed_gives_the_same_text() -> None:
    assert list(islice(documents(3), 50)) == list(islice(documents(3), 50))
    assert list(islice(documents(3), 50)) != list(islice(documents(4), 50))
    assert questions(9, seed=1) == questions(9, seed=1)


def test_questions_are_beginnings_of_documents() -> None:
    lines = set(islice(documents(0), 5000))
    assert all(question.line in lines for question in questions(20, seed=7))


def test_only_the_answer_alone_earns_everything() -> None:
    assert score("7", 7) == score(" 7", 7) == 1.0
    assert all(score(text, 7) < 1.0 for text in ["8", "77", "7 apples", "", "seven", "-7"])


@pytest.mark.parametrize(
    ("better", "worse"), [("7", "6"), ("6", "4"), ("7 a", "7 apples"), ("0", "no"), ("70", "x")]
)
def test_nearer_and_shorter_earns_more(better: str, worse: str) -> None:
    assert score(better, 7) > score(worse, 7)

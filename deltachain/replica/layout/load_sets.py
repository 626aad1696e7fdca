"""Sets of what is loaded together, so that a few loads tell any two apart."""

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, count
from math import comb, isqrt
from typing import TypeVar

_T = TypeVar("_T")


def crossing(groups: Sequence[_T]) -> tuple[list[Sequence[_T]], list[Sequence[_T]]]:
    """Return the rows and the columns of a square of groups: no two share both."""
    side = isqrt(max(len(groups) - 1, 0)) + 1
    columns = [groups[at : at + side] for at in range(0, len(groups), side)]
    return [groups[at::side] for at in range(min(side, len(groups)))], columns


def separating(groups: Sequence[_T]) -> Iterator[list[_T]]:
    """Yield subsets with each group, at most three times, but for no other group always with it."""
    sizes = ((number, min(3, max(1, number // 2))) for number in count(1))
    number, times = next(size for size in sizes if comb(*size) >= len(groups))
    chosen = list(zip(groups, combinations(range(number), times), strict=False))
    for at in range(number):
        yield [group for group, numbers in chosen if at in numbers]


def sets_of_kinds(names: Iterable[str]) -> list[list[list[str]]]:
    """Return sets of each kind of tensors, drawn at random; only numbers in names differ in a kind.

    Outputs follow tensors of several kinds, which do not get other bits together.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[re.sub(r"\d+", "0", name)].append(name)
    draw = random.SystemRandom().sample
    return [list(separating(draw(same, len(same)))) for same in kinds.values()]

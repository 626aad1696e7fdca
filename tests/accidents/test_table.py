"""Every accident, on every store, whatever becomes of the publisher."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.accidents.case import FATES, Case, Fate
from tests.accidents.happenings import FAR, HAPPENINGS, LIKELY
from tests.crash.child import KINDS, Place

CORE: Final[tuple[tuple[str, Fate], ...]] = (
    ("nothing", "alive"),
    ("restored 1 version back", "dead"),
    ("restored 10 versions back", "alive"),
    ("restored 10 versions back", "restarted with other weights"),
    ("chain.json gone", "alive"),
    ("chain.json gone", "restarted"),
    ("a manifest in the middle gone", "dead"),
    ("all objects but the newest gone", "restarted"),
    ("old deltas and anchors gone", "alive"),
    ("a manifest lost behind a yes", "alive"),
)


def cases(kind: str) -> Iterator[tuple[str, Fate]]:
    for number, accident in enumerate(name for name in HAPPENINGS if name not in FAR):
        fates = FATES if kind == "file" or accident in LIKELY else (FATES[number % len(FATES)],)
        yield from ((accident, fate) for fate in fates)


@pytest.fixture
def followers(tmp_path: Path) -> Path:
    made = tmp_path / "followers"
    made.mkdir()
    return made


@pytest.mark.full
@pytest.mark.parametrize(("accident", "fate"), CORE)
def test_the_likeliest(accident: str, fate: Fate, tmp_path: Path, followers: Path) -> None:
    assert Case(str(tmp_path / "store"), followers, accident, fate, versions=16).run() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "accident", "fate"),
    [(kind, *case) for kind in KINDS for case in cases(kind)],
    indirect=["place"],
)
def test_all(place: Place, accident: str, fate: Fate, followers: Path) -> None:
    assert Case(place.url(), followers, accident, fate).run() == []


@pytest.mark.slow
@pytest.mark.parametrize(("accident", "fate"), list(cases("file")))
def test_all_with_a_backup(accident: str, fate: Fate, tmp_path: Path, followers: Path) -> None:
    url = str(tmp_path / "store")
    assert Case(url, followers, accident, fate, has_backup=True).run() == []


@pytest.mark.slow
@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("place", KINDS, indirect=True)
@pytest.mark.parametrize("accident", FAR)
def test_a_thousand_versions(place: Place, accident: str, fate: Fate, followers: Path) -> None:
    assert Case(place.url(), followers, accident, fate, versions=1010).run() == []

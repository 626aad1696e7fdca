"""Split tensors into groups that have no layer in common, and remove duplicate placements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from deltachain.replica.windows import Placement


def components(
    names: Iterable[str],
    links: Mapping[str, frozenset[str]],
    together: Iterable[frozenset[str]],
) -> list[list[str]]:
    """Split names into groups without common layers or sets; keep the order."""
    root: dict[str, str] = {}
    first: dict[str, str] = {}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = name = root[root[name]]
        return name

    labels: dict[str, list[str]] = defaultdict(list)
    for number, one in enumerate(together):
        for name in one:
            labels[name].append(f"together {number}")
    wanted = list(names)
    for name in wanted:
        root[name] = name
        for label in (*links[name], *labels[name]):
            root[find(name)] = find(first.setdefault(label, name))
    groups: dict[str, list[str]] = defaultdict(list)
    for name in wanted:
        groups[find(name)].append(name)
    return list(groups.values())


def distinct(places: Iterable[Placement]) -> list[Placement]:
    """Return the placements without duplicates, which come from tied names."""
    found: dict[object, Placement] = {}
    for place in places:
        found.setdefault((place.live.data_ptr(), place.offset, place.dims), place)
    return list(found.values())

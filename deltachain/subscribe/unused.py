"""Checkpoint tensors that an engine does not use: proven, not assumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deltachain.errors import TensorMismatchError
from deltachain.subscribe.source import Source
from deltachain.subscribe.trial import State, mixed
from deltachain.subscribe.ways import RELOADS, Group, Way, bring


def find_unused(
    state: State,
    source: Source,
    groups: Sequence[tuple[Way, Group]],
    names: Iterable[str],
) -> dict[str, str]:
    """Load the whole checkpoint with other bits in some tensors alone; nothing may follow.

    Args:
        state: Of the model, which holds it again afterwards.
        source: The checkpoint that it loaded.
        groups: The ways into its weights that were proven.
        names: Tensors that no rank holds.

    Returns:
        Why each is not known to be unused; empty for one that is.
    """
    wanted = list(names)
    if not wanted or not _followed(state, source, groups, wanted):
        return dict.fromkeys(wanted, "")
    return {name: _followed(state, source, groups, [name]) for name in wanted}


def _followed(
    state: State, source: Source, groups: Sequence[tuple[Way, Group]], changed: Sequence[str]
) -> str:
    """What follows a full load with other bits in some tensors; empty for nothing."""
    packed = frozenset().union(*(group.layers for way, group in groups if way == "repacked"))
    missing = [name for name in changed if not source.names[name]]
    proven = [name for way, group in groups if way == "repacked" for name in group.names]
    loads: list[tuple[Way, frozenset[str], list[str]]] = [
        ("loaded", frozenset(), list(changed)),
        (
            "reloaded",
            frozenset(),
            [*(name for name in source.present if name not in proven), *missing],
        ),
        ("repacked", packed, [*proven, *changed]),
    ]
    done = 0
    for way, layers, names in loads:
        try:
            if way == "repacked" and not layers:
                continue
            bring(state.model, way, layers, mixed(source.clones, names, changed))
            state.expect_same()
            done += way in RELOADS
        except TensorMismatchError as exc:
            return str(exc.args[0])
        except Exception as exc:  # noqa: BLE001 - an engine may raise anything
            return f"loading it again fails: {exc!r}"[:200]
        finally:
            state.put_back()
    return "" if done else "no full load was possible"

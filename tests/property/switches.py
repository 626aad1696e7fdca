"""Every check of discovery, each with a switch; what is tried without one shows what it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

import pytest
from torch import Tensor

from deltachain.replica import live_record
from deltachain.replica.layout import derived, discover, loaded_checkpoint, reloads
from deltachain.replica.layout import in_place as read_back
from deltachain.replica.layout import loaded_checkpoint as other_bits
from deltachain.replica.layout.derived import _Search, find_derived
from deltachain.replica.layout.findings import Findings
from deltachain.replica.layout.members import Members, MemoryIndex
from deltachain.replica.layout.model_state import LoadGroup, ModelState
from deltachain.replica.layout.reloads import Trial, _Seen
from deltachain.replica.live_record import LateTies
from tests.property.check import KINDS
from tests.property.recipe import OPAQUE, Recipe, Unit

Switch: TypeAlias = Callable[[pytest.MonkeyPatch], None]


def _nothing(*_: object, **__: object) -> None: ...


def _none(*_: object, **__: object) -> frozenset[str]:
    return frozenset()


def _unchanged(*context: object) -> object:
    return context[-1]


def _skip(step: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(discover, step, _unchanged)


def _off(owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(owner, name, _nothing)


def _empty(owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(owner, name, _none)


def _own_change(patch: pytest.MonkeyPatch) -> None:
    def judge(seen: _Seen, name: str, group: LoadGroup, changed: frozenset[str]) -> str:
        del name, changed
        seen.left.discard(group.names[0])
        return ""

    patch.setattr(_Seen, "_judge", judge)


def _alone(patch: pytest.MonkeyPatch) -> None:
    load = Trial._load

    def together(trial: Trial, groups: Iterable[LoadGroup], others: Iterable[str] = ()) -> None:
        groups = list(groups)
        load(trial, groups, [n for g in groups for n in g.names] if [*others] else ())

    patch.setattr(Trial, "_load", together)


def _opaque(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelState, "opaque", frozenset())


def _where(patch: pytest.MonkeyPatch) -> None:
    def alike(tensor: Tensor, turn: int = 0) -> Tensor:
        return tensor * (2 + turn) + 1 if tensor.is_floating_point() else tensor ^ (1 + turn)

    patch.setattr(other_bits, "other_bits", alike)
    patch.setattr(loaded_checkpoint, "other_bits", alike)


def _uniform(patch: pytest.MonkeyPatch) -> None:
    _skip("verify_uniform", patch)
    patch.setattr(Trial, "lost", _none)


def _halves(patch: pytest.MonkeyPatch) -> None:
    """Groups are loaded all at once."""
    patch.setattr(reloads, "halves", lambda _: [])


def _turns(patch: pytest.MonkeyPatch) -> None:
    """Groups of one layer are tried at once."""
    patch.setattr(
        reloads, "_without_common_layers", lambda groups: [list(groups)] if groups else []
    )


def _kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trial, "write_untouched", _nothing)
    patch.setattr(Trial, "lost", _none)


def _ties(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryIndex, "overlapping", _none)
    patch.setattr(MemoryIndex, "tied", lambda _, names: names)


def _read_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(read_back, "holds_bits", lambda *_: True)
    patch.setattr(reloads, "holds_bits", lambda *_: True)


def _made(patch: pytest.MonkeyPatch) -> None:
    def find(state: ModelState, findings: Findings) -> Findings:
        return replace(find_derived(state, findings), derived={})

    patch.setattr(discover, "find_derived", find)


def _confirmed(patch: pytest.MonkeyPatch) -> None:
    """What a reload leaves out is taken to be of no use."""
    patch.setattr(reloads, "_unconfirmed", lambda *_: "")


def _nearby(patch: pytest.MonkeyPatch) -> None:
    affected = _Search.affected
    patch.setattr(_Search, "affected", lambda search, names, **_: affected(search, names))


def loaders(seed: int) -> Recipe:
    return KINDS["loaders"](seed)


def modules(seed: int) -> Recipe:
    """An engine with layers that are packed, tied, derived, and can be tried where they hide."""
    recipe = KINDS["modules"](seed)
    units = (replace(one, tryable=one.tryable or one.process in OPAQUE) for one in recipe.units)
    return replace(recipe, units=tuple(units))


def shares(seed: int) -> Recipe:
    """An engine with weights that it keeps as one, or moves."""
    return KINDS["shares"](seed)


HIDDEN: Final = Recipe(units=(Unit(process="pack"),))

INTO: Final = Recipe(units=(Unit(process="into"), Unit()))

ROWS: Final = Recipe(units=(Unit(process="derive", rows=(3,)),), reload="first rows")

TIED: Final = Recipe(units=(Unit(), Unit(tie=0, process="first")))

FEW: Final[dict[str, tuple[Switch, Recipe]]] = {
    "its own change is followed": (_own_change, loaders(945)),
    "the change back is followed": (partial(_off, ModelState, "expect_same"), loaders(6)),
    "members are put back": (partial(_off, Members, "put_back"), loaders(0)),
    "what is derived is found": (partial(_skip, "find_derived"), modules(76)),
    "what is kept as one stays equal": (partial(_off, LateTies, "check"), shares(12)),
    "slots that move are seen": (
        lambda patch: patch.setattr(live_record, "slots_of", lambda *_: {}),
        shares(0),
    ),
    "equal matrices are kept as one, too": (partial(_off, LateTies, "check"), shares(20)),
}
"""Switches, and an engine that is then followed wrong or damaged, by what they switch off."""

MORE: Final[dict[str, tuple[Switch, Recipe]]] = {
    "a neighbour's change proves nothing": (_alone, modules(2499)),
    "other bits show where they go": (_where, loaders(23)),
    "groups are loaded apart": (_halves, loaders(86)),
    "loading is repeatable": (partial(_empty, Trial, "_expect_repeatable"), loaders(23)),
    "groups of one layer take turns": (_turns, modules(889)),
    "what is not loaded keeps other bits": (_kept, loaders(3330)),
    "live bits are read back": (_read_back, modules(1065)),
    "equal elements keep their placement": (_uniform, loaders(85)),
    "layers compute from it": (partial(_skip, "verify_in_place"), modules(219)),
    "equal elements prove no placement": (partial(_skip, "refuse_unverifiable"), modules(116)),
    "layers that cannot be inspected are refused": (partial(_skip, "find_untestable"), HIDDEN),
    "ties are followed": (_ties, TIED),
    "what is derived follows": (_made, modules(194)),
    "a constant was made again": (partial(_off, _Search, "expect_made"), modules(255)),
    "a constant stays when the same is loaded": (
        partial(_off, _Search, "expect_stable"),
        loaders(207),
    ),
    "what a reload leaves out is confirmed": (_confirmed, modules(994)),
    "what is read after a swap can be": (
        partial(_empty, reloads, "_displaced"),
        loaders(10501),
    ),
    "what is opaque is not loaded": (_opaque, INTO),
    "what a load changes beside is followed": (
        partial(_off, _Seen, "_expect_followed"),
        modules(1472),
    ),
    "what is unused is stored nowhere": (
        lambda patch: patch.setattr(derived, "_held", lambda *_: {}),
        loaders(19581),
    ),
    "everything is loaded once": (_nearby, modules(1041)),
    "other bits arrive where they were recorded": (partial(_empty, reloads, "_stray"), ROWS),
    "outputs are restored": (partial(_off, discover, "restore_outputs"), modules(1798)),
}

SETTLE: Final = partial(_off, Members, "settle")
"""Tensors do not keep their places: engines are refused that can be followed."""

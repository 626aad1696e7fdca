"""Names of an engine that are looked up in its source, which is not imported."""

import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deltachain.errors import EngineVersionError
from deltachain.replica.capabilities import SERVER, Capability, CapabilityTable, is_there
from tests.support.made_up import forget, write_engine

SOURCES = {
    "__init__.py": "raise RuntimeError('it was imported')",
    "base.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from .typed import OnlyATypeChecker
class Base:
    inherited: int
    def __init__(self): self.set_in_init = self.waiting = 1
class Again(Again): ...
""",
    "deep/__init__.py": """
from ..base import *
from torch import nn, Tensor as Elsewhere
from . import below
""",
    "deep/below.py": """
from enginely.base import Base as Renamed
import struct
try:
    from gone import fast
except ImportError:
    fast = None
class Scheduler(Renamed, below.Unknown):
    limit: int = 3
    async def add(self, request, *, wait=True): self.queue: list = []
    @property
    def paused(self): ...
class Message(Renamed_not_known):
    action: str
def call(a, b, c=1, **more): ...
def strict(a, *, needed): ...
""",
}


@pytest.fixture
def _engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, source in SOURCES.items():
        path = tmp_path / "enginely" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield
    forget()


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("enginely", True),
        ("enginely.deep.below", True),
        ("enginely.deep.above", False),
        ("nowhere_at_all:x", False),
        ("enginely.deep.below:Scheduler", True),
        ("enginely.deep.below:Scheduler.limit", True),
        ("enginely.deep.below:Scheduler.queue", True),
        ("enginely.deep.below:Scheduler.paused", True),
        ("enginely.deep.below:Scheduler.inherited", True),
        ("enginely.deep.below:Scheduler.set_in_init", True),
        ("enginely.deep.below:Scheduler.request", False),
        ("enginely.deep.below:fast", True),
        ("enginely.deep.below:struct", True),
        ("enginely.deep:below.Scheduler.waiting", True),
        ("enginely.deep:Base.inherited", True),
        ("enginely.deep:Elsewhere", True),
        ("enginely.base:OnlyATypeChecker", False),
        ("enginely.base:Again.inherited", False),
        ("enginely.deep.below:Scheduler.add(request)", True),
        ("enginely.deep.below:Scheduler.add(request, wait)", True),
        ("enginely.deep.below:Scheduler.add(request, priority)", False),
        ("enginely.deep.below:Scheduler.add()", False),
        ("enginely.deep.below:Message(action)", True),
        ("enginely.deep.below:Message(verb)", False),
        ("enginely.deep.below:call(a, b, other)", True),
        ("enginely.deep.below:strict(a)", False),
        ("enginely.deep.below:strict(a, needed)", True),
    ],
)
def test_a_name_is_found_where_the_engine_binds_it(name: str, there: bool) -> None:
    assert is_there(name) is there


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("loaded_engine:call(a)", True),
        ("loaded_engine:call(a,b)", True),
        ("loaded_engine:call(b)", False),
        ("loaded_engine:call(a,c)", False),
        ("loaded_engine:wrapped(a)", False),
        ("loaded_engine:wrapped", True),
        ("loaded_engine:gone", False),
    ],
)
def test_a_name_of_a_loaded_module_is_found_without_its_source(
    name: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("loaded_engine")
    module.call, module.wrapped = lambda a, *, b=1: (a, b), lambda *values: values
    module.__spec__ = ModuleSpec("loaded_engine", None)
    monkeypatch.setitem(sys.modules, "loaded_engine", module)
    forget()
    assert is_there(name) is there
    forget()


TABLE = CapabilityTable(
    engine="Enginely",
    tested=("0.3", "0.4"),
    rows=(
        Capability("swaps", ("enginely.core:Engine.swap(weights)",)),
        Capability("labels tokens", ("enginely.core:Label",), without="no token has a label"),
        Capability("keeps caches", ("enginely.core:salt()",), "in_place is refused", "in_place"),
        Capability("adds routes", ("enginely.core:app",), "no server follows", SERVER),
    ),
)


@pytest.fixture
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def write(*names: str) -> None:
        write_engine(tmp_path, TABLE, names)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield write
    forget()


@pytest.mark.parametrize(
    ("row", "refusing"),
    [(0, ("", SERVER, "in_place")), (1, ()), (2, ("in_place",)), (3, (SERVER,))],
)
def test_a_missing_name_is_refused_by_the_uses_that_need_it_and_else_told(
    without: Callable[..., None], row: int, refusing: tuple[str, ...]
) -> None:
    without()
    TABLE.check("0.3.1", ["", SERVER, "in_place"])
    assert list(TABLE.remarks("0.3.1")) == []
    (name,) = TABLE.rows[row].names
    without(name)
    for use in ("", "keep", SERVER, "in_place"):
        if use not in refusing and "" not in refusing:
            TABLE.check("0.3.1", ["", use])
            continue
        with pytest.raises(EngineVersionError) as caught:
            TABLE.check("0.3.1", ["", use])
        assert f"Enginely 0.3.1 has no {name}, by which deltachain" in str(caught.value)
        assert caught.value.hint == "install a release of it that was run: 0.3, 0.4"
        with pytest.raises(EngineVersionError) as caught:
            TABLE.check("0.3", ["", use])
        assert caught.value.hint == "install a release of it that was run: 0.4"
    assert list(TABLE.remarks("0.3.1")) == (
        [f"Enginely 0.3.1 has no {name}: {TABLE.rows[row].without}"] if row else []
    )


@pytest.mark.parametrize(
    ("version", "was_run"),
    [("0.3", True), ("0.4.7+cpu", True), ("0.4rc1", True), ("0.30", False), ("1.0", False)],
)
def test_a_version_that_was_not_run_is_told_once_and_not_refused(
    without: Callable[..., None],
    version: str,
    was_run: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    without()
    TABLE.check(version, [SERVER, "in_place"])
    TABLE.tell(version)
    said = f"Enginely {version} was not run with this deltachain, 0.3, 0.4 were"
    assert [said in one for one in caplog.messages] == [True] * (not was_run)

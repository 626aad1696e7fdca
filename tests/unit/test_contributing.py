"""The lists of files to touch in CONTRIBUTING.md are those that the code asks for."""

import ast
import re
from pathlib import Path
from typing import Final, get_args

import pytest

from deltachain import publish
from deltachain.cli.fleet import Verb
from deltachain.control.replica_client import ReplicaClient
from deltachain.control.routes import router
from deltachain.format.documents import EdgeKind
from deltachain.publish.quantise.settings import GROUP, RECIPES
from deltachain.replica.leader import Leader

ROOT: Final = Path(__file__).resolve().parents[2]
GUIDE: Final = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

ENGINES: Final = ("vllm_ext/deltachain_vllm", "sglang_ext/deltachain_sglang", "tests/support")


def item(text: str, name: str) -> str:
    """An item of a list, its lines included."""
    _, found, rest = text.partition(f"\n* **{name}**: ")
    assert found, name
    return rest.partition("\n\n")[0].partition("\n* ")[0]


def row(new: str) -> str:
    """What the guide says of something new."""
    return item(GUIDE, new)


def files(new: str) -> set[str]:
    return {path for path in re.findall(r"`([\w/.]+\.(?:py|md|toml))`", row(new)) if "/" in path}


def compares_kinds(source: Path) -> bool:
    """Whether a module has kinds of edges as strings, but for keys of its own dictionaries."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    keys = {id(k) for node in ast.walk(tree) if isinstance(node, ast.Dict) for k in node.keys}
    keys |= {
        id(node.slice)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Tuple)
    }
    kinds = set(get_args(EdgeKind)) - {"base"}  # which is also a name of columns and options
    return any(
        isinstance(node, ast.Constant) and node.value in kinds and id(node) not in keys
        for node in ast.walk(tree)
    )


@pytest.mark.full
def test_an_edge_kind_is_named_in_these_files_alone() -> None:
    sources = [*(ROOT / "deltachain").rglob("*.py"), *(ROOT / "spaces").rglob("*.py")]
    found = {str(s.relative_to(ROOT)) for s in sources if compares_kinds(s)}
    assert found == files("edge kind")


def actions() -> set[str]:
    return {
        str(route.path).rpartition("/")[2]  # type: ignore[attr-defined]
        for route in router.routes
        if "POST" in route.methods  # type: ignore[attr-defined]
    }


def test_a_route_is_in_each_of_its_places() -> None:
    assert actions() == {verb.value for verb in Verb} - {"status"}
    for action in actions():
        assert callable(getattr(Leader, action))
        assert callable(getattr(ReplicaClient, action))
    named = files("route")
    tables = {path for path in named if path.endswith(".md")}
    assert tables == {"docs/serve.md"}
    for path in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        missing = [a for a in actions() if not re.search(rf"\b{a}\b", text)]
        assert missing == [], path


def section(title: str) -> str:
    return GUIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_a_recipe_is_in_each_of_its_places() -> None:
    text = section("To add a recipe")
    named = {
        path
        for path in re.findall(r"`([\w/.]+\.(?:py|md))`", item(text, "in this package"))
        if "/" in path
    }
    built_in = {name for name in RECIPES if "." not in name}
    parts = {path for path in named if path.rpartition("/")[2] in ("compressed.py", "registry.py")}
    assert len(named - parts) == 6
    for path in named - parts:
        content = (ROOT / path).read_text(encoding="utf-8")
        missing = [name for name in built_in if not re.search(rf"[`\"]{name}[`\"]", content)]
        assert missing == [], path
    assert f'[project.entry-points."{GROUP}"]' in text


def members(source: Path) -> dict[str, set[str]]:
    """Public methods of each class of a module, and attributes that it assigns to ``self``."""
    found = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            names |= {
                one.attr
                for one in ast.walk(node)
                if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
            }
            found[node.name] = {name for name in names if not name.startswith("_")}
    return found


@pytest.mark.parametrize("package", ENGINES)
@pytest.mark.parametrize("protocol", ["EngineModel", "Engine"])
def test_an_engine_is_a_class_for_each_protocol(package: str, protocol: str) -> None:
    assert f"`{protocol}`" in row("engine")
    wanted = members(ROOT / "deltachain" / "replica" / "engine.py")[protocol]
    classes = [c for source in (ROOT / package).glob("*.py") for c in members(source).values()]
    assert any(wanted <= one for one in classes)


@pytest.mark.parametrize("package", ENGINES)
def test_ranks_of_an_engine_pass_messages_to_the_service(package: str) -> None:
    text = "".join(s.read_text(encoding="utf-8") for s in (ROOT / package).glob("*.py"))
    assert "`RankService`" in row("engine")
    assert re.search(r"\.(answer|respond)\(\w", text)


def test_a_trainer_framework_is_in_each_file_that_is_named() -> None:
    named = files("trainer framework")
    assert all((ROOT / path).is_file() for path in named)
    homes = {
        name: ROOT / "deltachain/publish" / f"{home}.py"
        for name, home in publish._HOME.items()
        if home.endswith("_trainer")
    }
    assert homes
    assert set(homes.values()) == set((ROOT / "deltachain/publish").glob("*_trainer.py"))
    places = (path for path in named if path.endswith(("__init__.py", "hook.py", "publish.md")))
    for place in places:
        text = (ROOT / place).read_text(encoding="utf-8")
        assert all(name in text for name in homes), place

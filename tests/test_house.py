"""Rules of the house that a machine can check."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENTRY_POINTS = {
    ("console_scripts", "deltachain"): "deltachain.cli:main",
    ("vllm.general_plugins", "deltachain"): "deltachain_vllm:register",
    ("vllm.endpoint_plugins", "deltachain_http"): "deltachain_vllm:EndpointPlugin",
    ("sglang.srt.plugins", "deltachain"): "deltachain_sglang:register",
}


def every_module(package: str) -> list[str]:
    """A package with everything below it; or a module alone."""
    folder = ROOT / package.replace(".", "/")
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    found = (file.relative_to(ROOT).with_suffix("").parts for file in files)
    return [".".join(parts).removesuffix(".__init__") for parts in found]


def run_python(code: str) -> str:
    """Standard output of ``code`` in a fresh interpreter, which has imported nothing yet."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def contract(name: str) -> dict[str, Any]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return next(c for c in contracts if c["name"] == name)


def test_import_takes_less_than_300_ms() -> None:
    code = (
        "import time; start = time.perf_counter(); import deltachain; "
        "print(time.perf_counter() - start)"
    )
    assert min(float(run_python(code)) for _ in range(3)) < 0.3


def test_import_loads_no_torch() -> None:
    assert run_python("import sys, deltachain; print('torch' in sys.modules)").strip() == "False"


def test_torch_free_modules_load_no_torch() -> None:
    # The import contract lets them reach torch through a lazy import, which only running shows.
    packages = contract("torch stays at the ends")["source_modules"]
    modules = [name for package in packages for name in every_module(package)]
    assert len(modules) > len(packages)
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


@pytest.mark.full
def test_plain_modules_are_attached_without_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, torch, deltachain\n"
        f"config = deltachain.PublishConfig(url={str(tmp_path)!r})\n"
        "with deltachain.Publisher(config).attach(torch.nn.Linear(2, 2)) as publisher:\n"
        "    publisher.publish(step=1)\n"
        "print('transformers' in sys.modules)"
    )
    assert run_python(code).strip() == "False"


def test_examples_are_a_section_that_the_documents_know() -> None:
    # Under "Example:" the lines of a doctest are rendered as one paragraph.
    wrong = [
        f"{path}:{number}"
        for path in (ROOT / "deltachain").rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.strip() == "Example:"
    ]
    assert not wrong


def test_import_contracts_hold() -> None:
    lint = Path(sysconfig.get_path("scripts")) / "lint-imports"
    done = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def modules_of(folder: Path) -> set[str]:
    """Names of the modules and packages in a package."""
    return {
        path.stem
        for path in folder.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }


def test_every_module_has_a_layer() -> None:
    layers = contract("layers point down")["layers"]
    placed = {module.strip() for layer in layers for module in re.split(r"[|:]", layer)}
    found = {f"deltachain.{name}" for name in modules_of(ROOT / "deltachain")}
    assert found - placed == {"deltachain.__init__", "deltachain.__main__", "deltachain.testing"}


def test_entry_points_are_the_ones_engines_look_for() -> None:
    found = importlib.metadata.distribution("deltachain").entry_points
    assert {(e.group, e.name): e.value for e in found} == ENTRY_POINTS
    assert all(callable(e.load()) for e in found)


@pytest.mark.parametrize("module", ["deltachain_vllm", "deltachain_sglang"])
def test_register_is_light_and_may_be_called_twice(module: str) -> None:
    code = (
        f"import sys, {module} as plugin; plugin.register(); plugin.register(); "
        "print({'torch', 'vllm', 'sglang'} & sys.modules.keys())"
    )
    assert run_python(code).strip() == "set()"


@pytest.mark.full
def test_endpoint_plugin_has_the_shape_vllm_expects() -> None:
    # vLLM: a factory without arguments, whose product is named as VLLM_PLUGINS names it.
    code = (
        "import asyncio, fastapi, sys, types, deltachain_vllm; "
        "plugin = deltachain_vllm.EndpointPlugin(); app = fastapi.FastAPI(); "
        "plugin.attach_router(app); "
        "asyncio.run(plugin.init_state(None, app.state, types.SimpleNamespace())); "
        "leader = app.state.deltachain.leader; "
        "print(plugin.name, plugin.required_tasks, 'vllm' in sys.modules, leader)"
    )
    assert run_python(code).split() == ["deltachain_http", "None", "False", "None"]


PRODUCT = ("deltachain", "vllm_ext/deltachain_vllm", "sglang_ext/deltachain_sglang")


def public_types() -> Iterator[tuple[str, str]]:
    """Every public class and type alias of the product, and the file that defines it."""
    for path in (file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            name = ""
            if isinstance(node, ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
                name = ast.unparse(node.target)
            if name and not name.startswith("_"):
                yield name, str(path.relative_to(ROOT))


def test_no_public_type_is_defined_twice() -> None:
    """One idea a word: a reader who knows a name from one file is not misled in another."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, path in public_types():
        found[name].append(path)
    assert len(found) > 300
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}

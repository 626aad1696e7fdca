"""The tables of the names of engines have each name that the plugins use."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltachain.replica.capabilities import CapabilityTable
from deltachain_sglang import compat
from deltachain_sglang.table import TABLE as SGLANG
from deltachain_vllm.table import TABLE as VLLM

ROOT = Path(__file__).parents[2]

LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
CLIENT = "vllm.v1.engine.async_llm.AsyncLLM"
CONTEXT = "sglang.srt.runtime_context"

HOLDERS = {
    "vllm": {
        "self._client": CLIENT,
        "steps": LAYERWISE,
        "layerwise()": LAYERWISE,
        "compat.layerwise()": LAYERWISE,
        "reload": LAYERWISE,
        "base": "vllm.distributed.weight_transfer.base",
    },
    "sglang": {
        "self._manager": "sglang.srt.managers.tokenizer_manager.TokenizerManager",
        "_messages()": "sglang.srt.managers.io_struct",
        "context()": CONTEXT,
        "compat.context()": CONTEXT,
        "loader": "sglang.srt.model_loader.loader",
    },
}
"""Expressions of the plugins, and what of the engine they hold."""

MADE = {"sglang.srt.managers.tokenizer_manager.TokenizerManager.check_weights_communicator"}
"""Attributes that no source names: they are made of a list."""


def used(engine: str, tree: ast.Module) -> Iterator[str]:
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{engine}."):
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            imported |= {name: f"{node.module}.{own}" for name, own in names.items()}
    yield from imported.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if holder := HOLDERS[engine].get(ast.unparse(node.value)):
                yield f"{holder}.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "hook":
            owner, name = map(ast.unparse, node.args[:2])
            if owner in imported:
                yield f"{imported[owner]}.{name[1:-1]}"


HOOKED = {
    value
    for value in vars(compat).values()
    if isinstance(value, str) and value.startswith("sglang.srt.")
}


@pytest.mark.parametrize(("engine", "table"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_each_name_that_a_plugin_uses_is_in_its_table(engine: str, table: CapabilityTable) -> None:
    found = set(HOOKED) if engine == "sglang" else set()
    for file in (ROOT / f"{engine}_ext" / f"deltachain_{engine}").glob("*.py"):
        found |= set(used(engine, ast.parse(file.read_text(encoding="utf-8"))))
    assert len(found) > 30
    rows = [name.partition("(")[0].replace(":", ".") for row in table.rows for name in row.names]
    known = MADE.union(rows)
    absent = {one for one in found if not any(f"{row}.".startswith(f"{one}.") for row in known)}
    assert absent == set()

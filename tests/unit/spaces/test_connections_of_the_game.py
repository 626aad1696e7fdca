"""The game limits its connections with the code of the dashboard, and has a copy of its own."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

import connections
from deltachain.dashboard import app as dashboard


def undocumented(module: ModuleType, name: str) -> str:
    tree = ast.parse(inspect.getsource(getattr(module, name)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            del node.body[0]
    return ast.unparse(tree)


def test_the_copy_is_the_same() -> None:
    for name in ("LimitedHttp", "limited"):
        assert undocumented(connections, name) == undocumented(dashboard, name)

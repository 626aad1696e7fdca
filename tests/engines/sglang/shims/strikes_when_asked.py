"""Lets ranks of SGLang fail when a test says so: see :mod:`tests.engines.strikes`.

SGLang starts its schedulers itself, and no argument of its command line leads into them.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname == "deltachain_sglang.ranks":
            sys.meta_path.remove(self)
            importlib.import_module("tests.engines.strikes")
            importlib.import_module("tests.engines.sglang.local_experts")
        return None


if os.environ.get("TEST_DELTACHAIN_STRIKE"):
    sys.meta_path.insert(0, _Finder())

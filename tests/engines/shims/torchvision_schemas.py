"""Lets torchvision be imported beside a torch for CPUs; a ``.pth`` file imports this first.

The only torchvision on PyPI is built for CUDA and cannot load its operators. Importing it then
fails over the schemas of two of them, which are declared here as soon as somebody asks for it.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPERATORS = ("nms", "qnms")

_kept: list[Any] = []


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare()
        return None


def _declare() -> None:
    import torch  # noqa: PLC0415

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        library.define(name + SCHEMA)
    _kept.append(library)  # what it declares goes when it does


sys.meta_path.insert(0, _Finder())

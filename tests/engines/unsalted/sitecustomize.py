"""Python imports this first: caches by version that know no versions, in all processes of a server.

It is also the module that takes the place of the one with salts.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        return spec_from_file_location(fullname, __file__) if "cache_salts" in fullname else None


OLDEST = "get_weight_version"


def salt_requests() -> None: ...


def renew(*_: object) -> None: ...


def check_salted() -> None: ...


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Finder())

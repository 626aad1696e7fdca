import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent

# Each engine has an environment of its own, and its tests import it. In any other they are not
# even collected.
collect_ignore = [name for name in ("sglang", "vllm") if importlib.util.find_spec(name) is None]

# SGLang decides when it is imported what kind of machine it is on.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

# Engines, and what they import, warn of each other's ways. Ours remain errors.
_FILTERS = ("default", "error:::deltachain", "error:::tests")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    """Tests import their engine at the top, where no mark applies."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(*_FILTERS))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Any]:
    from tests.engines.trainer import Trainer  # noqa: PLC0415 - takes seconds

    with Trainer(tmp_path) as trainer:
        yield trainer


@pytest.fixture
def replica(shared: Any) -> Iterator[Any]:
    """The replica that tests of a module share, settled before and after each."""
    assert shared.is_settled()
    yield shared
    assert shared.is_settled()

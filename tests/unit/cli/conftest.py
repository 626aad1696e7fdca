import shutil
from pathlib import Path

import pytest

from tests.unit.cli.support import Pushed, ok, random_state, train, write_checkpoint


@pytest.fixture(scope="session")
def _original(tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    root = tmp_path_factory.mktemp("pushed")
    states = [random_state()]
    for seed in range(1, 4):
        states.append(train(states[-1], seed))
    for number, state in enumerate(states):
        ok(
            "push",
            write_checkpoint(root / f"step-{number}", state),
            root / "chain",
            "--step",
            number,
        )
    ok("anchor", root / "chain")
    return Pushed(root / "chain", tuple(states))


@pytest.fixture
def pushed(_original: Pushed, tmp_path: Path) -> Pushed:
    """A copy of that chain, to do harm to."""
    shutil.copytree(_original.url, tmp_path / "chain")
    return Pushed(tmp_path / "chain", _original.states)

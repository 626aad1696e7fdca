"""DeepSpeed, megatron-core and verl, in environments of their own: their pins exclude ours."""

import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from deltachain.chain.chain import Chain
from deltachain.errors import UnsupportedModelError
from deltachain.integrations.megatron import shards
from deltachain.store import open_store
from deltachain.verify import verify

ROOT: Final = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.dist


def case(trial: str, ranks: int, how: str, *marks: Any) -> Any:
    venv = "verl" if trial.startswith("verl") else "trainers"
    return pytest.param(venv, trial, ranks, how, marks=[pytest.mark.venv(venv), *marks])


@pytest.mark.parametrize(
    ("venv", "trial", "ranks", "how"),
    [
        case("deepspeed_trials:zero", 4, "3"),
        *(
            case("deepspeed_trials:zero", 2, how, pytest.mark.slow)
            for how in ("3 persistent", "2", "1")
        ),
        case("megatron_trials:megatron", 4, "TP2-PP2"),
        case("megatron_trials:megatron", 4, "EP2"),
        case("verl_trials:megatron", 2, "TP2"),
    ],
)
def test_every_version_is_the_export_of_the_framework(
    tmp_path: Path, venv: str, trial: str, ranks: int, how: str
) -> None:
    url = (tmp_path / "chain").as_uri()
    done = subprocess.run(
        [
            ROOT / f".venv-{venv}" / "bin" / "python",
            "-m",
            "tests.ranks.spawn",
            f"tests.ranks.{trial}",
            str(ranks),
            how,
            url,
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    chain = Chain.open(open_store(url))
    assert [proof.version for proof in verify(chain)][:11] == list(range(11))


def test_a_bridge_of_another_library_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="expected a bridge of mbridge") as caught:
        shards(object(), [])
    assert "publish whole tensors" in caught.value.hint

"""DeepSpeed, megatron-core and verl, in environments of their own: their pins exclude ours."""

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from deltachain.chain.chain import Chain
from deltachain.errors import UnsupportedModelError
from deltachain.integrations.megatron import shards
from deltachain.store import open_store
from deltachain.verify import verify

ROOT: Final = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("trial", "ranks", "how"),
    [
        ("deepspeed_trials:zero", 4, "3"),
        *(
            pytest.param("deepspeed_trials:zero", 2, how, marks=pytest.mark.slow)
            for how in ("3 persistent", "2", "1")
        ),
        ("megatron_trials:megatron", 4, "TP2-PP2"),
        ("megatron_trials:megatron", 4, "EP2"),
        ("verl_trials:megatron", 2, "TP2"),
    ],
)
def test_every_version_is_the_export_of_the_framework(
    tmp_path: Path, trial: str, ranks: int, how: str
) -> None:
    venv = "venv-verl" if trial.startswith("verl") else "venv-trainers"
    python = ROOT / f".{venv}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"DeepSpeed, Megatron or verl is missing: make {venv}")
    url = (tmp_path / "chain").as_uri()
    done = subprocess.run(
        [
            python,
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

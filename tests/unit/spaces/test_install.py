"""The installation of deltachain into an image, with a ``pip`` that only writes down its call."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

SPACE: Final = Path(__file__).resolve().parents[3] / "spaces" / "rollout"
WHEEL: Final = "deltachain-0.1.0-py3-none-any.whl"

PIP: Final = """\
#!/usr/bin/bash
if [[ $3 == list ]]; then
  printf '%s\\n' "torch==2.13.0+cu129" "huggingface_hub==1.33.0" "Jmespath==1.0.0" "odd==1.1build1"
  exit
fi
printf '%s\\n' "$@" >"$CALLS/arguments"
while [[ $1 != --constraint ]]; do shift; done
cp "$2" "$CALLS/constraints"
exit "${CODE:-0}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("install.sh", "constraints.txt"):
        shutil.copy(SPACE / name, tmp_path)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "python3"
    program.write_text(PIP, encoding="utf-8")
    program.chmod(0o755)
    return tmp_path


def install(folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/usr/bin/bash", folder / "install.sh", "hf,s3"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "CALLS": str(folder)} | given,
    )


def test_packages_of_the_image_stay_and_all_others_are_pinned(folder: Path) -> None:
    (folder / WHEEL).touch()
    done = install(folder)
    assert done.returncode == 0, done.stderr
    arguments = (folder / "arguments").read_text(encoding="utf-8").splitlines()
    assert arguments[:3] == ["-m", "pip", "install"]
    assert arguments[-1] == f"{WHEEL}[hf,s3]"
    found = set((folder / "constraints").read_text(encoding="utf-8").splitlines())
    own = (folder / "constraints.txt").read_text(encoding="utf-8").splitlines()
    expected = {line for line in own if not line.startswith(("#", "huggingface-hub=", "jmespath="))}
    assert found == expected | {"huggingface-hub==1.33.0", "jmespath==1.0.0"}


@pytest.mark.parametrize("wheels", [[], [WHEEL, WHEEL.replace("0.1.0", "0.2.0")]])
def test_there_must_be_one_wheel(folder: Path, wheels: list[str]) -> None:
    for wheel in wheels:
        (folder / wheel).touch()
    done = install(folder)
    assert done.returncode == 2
    assert "error  there must be one wheel here" in done.stderr
    assert "\nhint   " in done.stderr
    assert not (folder / "arguments").exists()


def test_what_pip_cannot_do_ends_the_build(folder: Path) -> None:
    (folder / WHEEL).touch()
    assert install(folder, CODE="1").returncode == 1

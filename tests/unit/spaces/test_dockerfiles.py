from __future__ import annotations

import io
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, Final

import pytest
from dockerfile_parse import DockerfileParser

from deltachain_sglang import start_check as sglang
from deltachain_vllm import start_check as vllm

ROOT: Final = Path(__file__).resolve().parents[3]
SPACES: Final = sorted(path.parent for path in (ROOT / "spaces").glob("*/Dockerfile"))
ENGINES: Final = {
    "vllm-rollout": ("vllm/vllm-openai", vllm.TESTED.first),
    "sglang-rollout": ("lmsysorg/sglang", sglang.TESTED.first),
}

every_space = pytest.mark.parametrize("space", SPACES, ids=lambda space: str(space.name))


def instructions(space: Path) -> list[tuple[str, str]]:
    """Name and value of each instruction, in order."""
    parser = DockerfileParser(fileobj=io.BytesIO((space / "Dockerfile").read_bytes()))
    structure: list[dict[str, Any]] = parser.structure
    return [(i["instruction"], i["value"]) for i in structure if i["instruction"] != "COMMENT"]


def only(space: Path, name: str) -> str:
    """The value of an instruction that is there once."""
    (value,) = [value for found, value in instructions(space) if found == name]
    return value


def header(space: Path) -> dict[str, str]:
    """What the README tells the Hub: YAML without any of its surprises."""
    _, front, _ = (space / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    lines = [re.fullmatch(r"(\w+): ([^:#\"'{[]+)", line) for line in front.splitlines()]
    assert all(lines), front
    return {line[1]: line[2] for line in lines if line}


def test_there_are_three() -> None:
    assert {space.name for space in SPACES} == {"environment", *ENGINES}


@every_space
def test_hadolint_finds_nothing(space: Path) -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    program = str(hadolint) if hadolint.exists() else shutil.which("hadolint")
    assert program, "pip install --group dev"
    command = [program, "--no-color", str(space / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@every_space
def test_the_image_is_pinned(space: Path) -> None:
    tag = only(space, "FROM").rpartition(":")[2]
    assert re.match(r"v?\d+\.\d+\.\d+(-|$)", tag), tag


@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_is_a_release_that_is_tested(name: str) -> None:
    image, tested = ENGINES[name]
    version = ".".join(map(str, tested))
    assert re.match(rf"{image}:v{version}(\.|-|$)", only(ROOT / "spaces" / name, "FROM"))


def test_the_images_of_engines_differ_by_their_base_alone() -> None:
    # A Space is built from its own folder alone, so each has a copy.
    files = [(ROOT / "spaces" / name / "Dockerfile").read_text("utf-8") for name in ENGINES]
    (_, *one), (_, *other) = (file.splitlines() for file in files)
    assert one == other


@every_space
def test_it_runs_as_user_1000(space: Path) -> None:
    names = [name for name, _ in instructions(space)]
    assert only(space, "USER") == "1000"
    assert not {"RUN", "COPY", "ADD"} & set(names[names.index("USER") :])


@every_space
def test_it_listens_where_the_hub_asks(space: Path) -> None:
    assert only(space, "EXPOSE") == "7860"
    assert header(space)["app_port"] == "7860"


@every_space
def test_nothing_secret_is_built_in(space: Path) -> None:
    named = [value for name, value in instructions(space) if name in ("ENV", "ARG")]
    assert not re.search(r"TOKEN|SECRET|KEY|PASSWORD|hf_", " ".join(named), re.IGNORECASE)
    assert "ADD" not in [name for name, _ in instructions(space)]


@every_space
def test_what_is_copied_is_there(space: Path) -> None:
    for name, value in instructions(space):
        if name == "COPY":
            *sources, _ = [word for word in value.split() if not word.startswith("--")]
            assert all(source == "*.whl" or (space / source).is_file() for source in sources)


@every_space
def test_the_header_is_one_that_the_hub_takes(space: Path) -> None:
    found = header(space)
    assert found["sdk"] == "docker"
    assert len(found["short_description"]) <= 60
    colours = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
    assert {found["colorFrom"], found["colorTo"]} <= colours
    known = {"title", "emoji", "pinned", "suggested_hardware", "startup_duration_timeout"}
    rest = {"sdk", "app_port", "short_description", "colorFrom", "colorTo"}
    assert found.keys() <= known | rest

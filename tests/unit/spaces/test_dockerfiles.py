import io
import re
import shutil
import subprocess
import sysconfig
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Final

import pytest
from dockerfile_parse import DockerfileParser
from huggingface_hub import SpaceCard, SpaceCardData
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deltachain_sglang import table as sglang
from deltachain_vllm import table as vllm

VARIABLE: Final = re.compile(r"\$\{?([A-Z][A-Z_]+)\b")


def test_every_variable_is_in_the_table() -> None:
    texts = [(ROLLOUT / name).read_text("utf-8") for name in ("entrypoint.sh", "Dockerfile")]
    _, _, table = (ROLLOUT / "README.md").read_text(encoding="utf-8").partition("## Settings")
    # Bash's own, those that are set here, and vLLM's and SGLang's, which are only added to.
    others = {"HOME", "SECONDS", "DELTACHAIN_BASE", "VLLM_PLUGINS", "SGLANG_PLUGINS"}
    used = {name for text in texts for name in VARIABLE.findall(text)} - others
    documented = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", table))
    assert used == {name for name in documented if not name.startswith("AWS_")} - {
        "DELTACHAIN_PAUSE",
        "DELTACHAIN_POLL_S",
    }
    assert used


ROOT: Final = Path(__file__).resolve().parents[3]
SPACES: Final = sorted(path.parent for path in (ROOT / "spaces").glob("*/Dockerfile"))
ROLLOUT: Final = ROOT / "spaces" / "rollout"
GAME: Final = ROOT / "spaces" / "environment"
DASHBOARD: Final = ROOT / "spaces" / "dashboard"
LOCKS: Final = [ROOT / "tests" / "engines" / f"{engine}.txt" for engine in ("vllm", "sglang")]

every_space = pytest.mark.parametrize("space", SPACES, ids=lambda space: str(space.name))


def instructions(space: Path) -> list[tuple[str, str]]:
    parser = DockerfileParser(fileobj=io.BytesIO((space / "Dockerfile").read_bytes()))
    structure: list[dict[str, Any]] = parser.structure
    return [(i["instruction"], i["value"]) for i in structure if i["instruction"] != "COMMENT"]


def values(space: Path, name: str) -> list[str]:
    return [value for found, value in instructions(space) if found == name]


def card(space: Path) -> SpaceCardData:
    data: SpaceCardData = SpaceCard.load(space / "README.md").data
    return data


def pins(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    found = dict(line.split("==") for line in lines)
    return {canonicalize_name(name): version for name, version in found.items()}


def needed(package: str, extras: frozenset[str], known: dict[str, set[str]]) -> dict[str, set[str]]:
    name = canonicalize_name(package)
    if name in known and extras <= known[name]:
        return known
    known.setdefault(name, set()).update(extras)
    for line in requires(package) or []:
        one = Requirement(line)
        wanted = [{"extra": extra} for extra in (*extras, "")]
        if one.marker is None or any(one.marker.evaluate(asked) for asked in wanted):
            needed(one.name, frozenset(one.extras), known)
    return known


def test_there_are_three() -> None:
    assert {space.name for space in SPACES} == {"dashboard", "environment", "rollout"}


@every_space
def test_hadolint_finds_nothing(space: Path) -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    program = str(hadolint) if hadolint.exists() else shutil.which("hadolint")
    assert program, "pip install --group dev"
    command = [program, "--no-color", str(space / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@every_space
def test_every_image_is_pinned(space: Path) -> None:
    tags = [
        base.partition(" ")[0].rpartition(":")[2] for base in values(space, "FROM") if ":" in base
    ]
    assert tags
    assert all(re.match(r"v?\d+\.\d+\.\d+(-|$)", tag) for tag in tags), tags


def test_an_argument_decides_the_engine_and_each_is_a_release_that_is_tested() -> None:
    tested = {
        engine: names.TABLE.tested[-1] for engine, names in (("vllm", vllm), ("sglang", sglang))
    }
    *bases, last = values(ROLLOUT, "FROM")
    images = {"vllm": "vllm/vllm-openai", "sglang": "lmsysorg/sglang"}
    for base, (engine, image) in zip(bases, images.items(), strict=True):
        assert re.match(rf"{image}:v{tested[engine]}(\.\d+)? AS {engine}$", base)
    assert last == "${ENGINE}"
    assert values(ROLLOUT, "ARG")[:2] == ["ENGINE=vllm", "ENGINE"]


@every_space
def test_it_runs_as_user_1000(space: Path) -> None:
    names = [name for name, _ in instructions(space)]
    assert values(space, "USER") == ["1000"]
    assert not {"RUN", "COPY", "ADD"} & set(names[names.index("USER") :])


@every_space
def test_it_listens_where_the_hub_asks(space: Path) -> None:
    assert values(space, "EXPOSE") == ["7860"]
    assert card(space).app_port == 7860


@every_space
def test_nothing_secret_is_built_in(space: Path) -> None:
    named = values(space, "ENV") + values(space, "ARG")
    assert not re.search(r"TOKEN|SECRET|KEY|PASSWORD|hf_", " ".join(named), re.IGNORECASE)
    assert values(space, "ADD") == []


@every_space
def test_what_is_copied_is_there(space: Path) -> None:
    for value in values(space, "COPY"):
        *sources, _ = [word for word in value.split() if not word.startswith("--")]
        assert all(source.endswith("*.whl") or [*space.glob(source)] for source in sources)


@every_space
def test_the_header_is_one_that_the_hub_takes(space: Path) -> None:
    found = card(space)
    assert (found.sdk, found.license) == ("docker", "apache-2.0")
    assert found.tags
    assert all(tag == tag.lower() for tag in found.tags)
    rest: dict[str, Any] = found.to_dict()  # type: ignore[no-untyped-call]
    assert len(rest["short_description"]) <= 60
    colours = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
    assert {rest["colorFrom"], rest["colorTo"]} <= colours
    known = {"title", "emoji", "pinned", "suggested_hardware", "startup_duration_timeout"}
    more = {"sdk", "app_port", "short_description", "colorFrom", "colorTo", "license", "tags"}
    assert rest.keys() <= known | more


def test_everything_that_comes_with_deltachain_is_pinned_to_what_engines_are_tested_with() -> None:
    (extras,) = [one.partition("=")[2] for one in values(ROLLOUT, "ARG") if "EXTRAS" in one]
    pinned = pins(ROLLOUT / "constraints.txt")
    wanted = needed("deltachain", frozenset(extras.split(",")), {}).keys() - {"deltachain"}
    assert wanted <= pinned.keys()
    locks = [pins(lock) for lock in LOCKS]
    for name, version in pinned.items():
        tested = {lock[name] for lock in locks if name in lock}
        assert not tested or version in tested, name


@pytest.mark.parametrize("space", [GAME, DASHBOARD], ids=lambda space: str(space.name))
def test_everything_in_a_space_without_an_engine_is_pinned(space: Path) -> None:
    pinned = pins(space / "constraints.txt")
    found: dict[str, set[str]] = {}
    if space == DASHBOARD:
        needed("deltachain", frozenset(), found)
        del found["deltachain"]
    for line in (space / "requirements.txt").read_text(encoding="utf-8").splitlines():
        one = Requirement(line)
        needed(one.name, frozenset(one.extras), found)
        assert str(one.specifier) == f"=={pinned[canonicalize_name(one.name)]}"
    assert found.keys() <= pinned.keys()


def test_the_dashboard_has_what_rollouts_have() -> None:
    assert pins(DASHBOARD / "constraints.txt") == pins(ROLLOUT / "constraints.txt")

"""What recipes name exists: variables, metrics, routes, commands, secrets, releases."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from typer.main import get_command

from deltachain import environment
from deltachain.cli.app import app
from deltachain.control.routes import probes
from deltachain.figures import COUNTERS, GAUGES
from deltachain_vllm import start_check
from tests.unit.deploy.recipes import (
    DEPLOY,
    ENVIRONMENTS,
    SKYPILOT,
    commands,
    containers,
    files,
    load,
    services,
    variables,
)

METRICS: Final = {f"deltachain_{name}" for name in GAUGES} | {
    f"deltachain_{name}_total" for name in COUNTERS
}
PLUGINS: Final = {"deltachain_vllm", "deltachain_http"}
RUN: Final = [(where, words) for where, words in commands() if words[:1] == ["deltachain"]]


def named(pattern: str) -> dict[str, str]:
    return {
        name: str(path.relative_to(DEPLOY))
        for path in files()
        for name in re.findall(pattern, path.read_text(encoding="utf-8"))
    }


def test_every_variable_is_known() -> None:
    known = {environment.PREFIX + name for name in environment.VARIABLES}
    found = named(r"\bDELTACHAIN_[A-Z_]+\b")
    assert {name: path for name, path in found.items() if name not in known} == {}
    assert {"DELTACHAIN_TOKEN_FILE", "DELTACHAIN_MAX_SILENCE_S"} <= found.keys()


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_value_is_valid(path: Path) -> None:
    environment.read(variables(path))


def test_values_of_the_other_recipes_are_valid() -> None:
    for _, container in containers():
        environment.read({row["name"]: row["value"] for row in container.get("env", ())})
    for path in SKYPILOT:
        environment.read({name: str(value) for name, value in load(path)["envs"].items()})
    for made in load(DEPLOY / "kubernetes" / "kustomization.yaml")["configMapGenerator"]:
        environment.read(dict(row.split("=", 1) for row in made["literals"]))


def test_every_metric_is_shown_by_some_part() -> None:
    found = named(r"\bdeltachain_[a-z_]+\b")
    assert {n: path for n, path in found.items() if n not in METRICS | PLUGINS} == {}
    assert len(METRICS & found.keys()) > 10


@pytest.mark.parametrize(("where", "words"), RUN, ids=[where for where, _ in RUN])
def test_every_command_parses(where: str, words: Sequence[str]) -> None:
    known: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    known[words[1]].make_context(where, list(words[2:]))


def test_every_recipe_runs_a_maintainer() -> None:
    recipes = {where.partition("/")[0] for where, words in RUN if "maintain" in words}
    assert recipes == {"compose", "kubernetes", "skypilot", "hf-jobs"}


def test_probes_are_routes_without_a_key() -> None:
    open_to_all = {getattr(route, "path", "") for route in probes.routes}
    for name, container in containers():
        found = {
            probe["httpGet"]["path"] for kind, probe in container.items() if kind.endswith("Probe")
        }
        if name.startswith("replica/"):
            assert found == open_to_all
        else:
            assert found <= {"/healthz", "/readyz"}
    (replica,) = [load(path) for path in SKYPILOT if path.stem == "replica"]
    assert replica["service"]["readiness_probe"]["path"] in open_to_all
    assert any(path in services()["replica"]["healthcheck"]["test"][-1] for path in open_to_all)


def test_no_secret_is_in_a_specification() -> None:
    for path in files():
        is_read_by_people = path.suffix == ".md"
        if path.parent.name != "hf-jobs" and not is_read_by_people:  # Jobs encrypt secrets
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"DELTACHAIN_TOKEN\b(?!_FILE)", text), path
            assert not re.search(r"(?i)aws_secret_access_key\s*[:=] *[A-Za-z0-9/+]{8}", text), path


def test_compose_defines_what_its_services_use() -> None:
    document = load(DEPLOY / "compose" / "compose.yaml")
    for name, service in services().items():
        assert set(service.get("secrets", ())) <= document["secrets"].keys(), name
        for file in service.get("env_file", ()):
            assert (DEPLOY / "compose" / file).is_file(), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            is_folder = source.startswith(".") and (DEPLOY / "compose" / source).is_dir()
            assert is_folder or source in document["volumes"], name


def test_settings_of_the_trainer_are_read_by_it() -> None:
    script = (DEPLOY / "train.py").read_text(encoding="utf-8")
    for path in ENVIRONMENTS:
        if path.stem == "trainer":
            for name in variables(path).keys() - {"HF_HOME"}:
                assert f'"{name}"' in script, name


def test_the_engine_is_a_release_that_is_tested() -> None:
    tested = ".".join(map(str, start_check.TESTED.first))
    found = named(r"vllm(?:-openai)?(?::v|==)(\d+\.\d+)\.\d+")
    assert set(found) == {tested}

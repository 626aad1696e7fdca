"""What recipes name exists: variables, metrics, routes, commands, secrets, releases."""

import json
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard
from typer.main import get_command

from deltachain import environment
from deltachain.cli.app import app
from deltachain.control.routes import probes
from deltachain.metrics import COUNTERS, GAUGES
from deltachain_vllm import table
from tests.unit.deploy.recipes import (
    COMPOSE,
    DASHBOARD,
    DEPLOY,
    ENVIRONMENTS,
    JOBS,
    KUBERNETES,
    ROOT,
    SKYPILOT,
    TOOLS,
    commands,
    containers,
    files,
    load,
    load_all,
    services,
    variables,
)

SCRIPTS: Final = Path(sysconfig.get_path("scripts"))
SKY: Final = ROOT / ".venv-sky" / "bin" / "python"

PARSE_TASK: Final = """
import sys, sky
from sky.utils.infra_utils import InfraInfo
task = sky.Task.from_yaml(sys.argv[1])
print(task.name, [one.region for one in task.resources], task.service is not None)
for infra in sys.argv[2:]:
    found = InfraInfo.from_str(infra)
    task.set_resources_override({"region": found.region})
    print([one.region for one in task.resources])
"""


def run(command: Sequence[str | Path], cwd: Path = DEPLOY, **more: Any) -> str:
    words: list[str] = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=cwd, timeout=300, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said: str = done.stdout + done.stderr
    return said


@pytest.fixture(scope="session")
def promtool() -> str:
    found = shutil.which("promtool") or shutil.which("promtool", path=str(TOOLS))
    if found is None:
        pytest.skip("promtool is missing: make prometheus")
    return found


@pytest.mark.full
def test_compose_follows_a_schema_that_refuses_what_is_wrong(tmp_path: Path) -> None:
    check: list[str | Path] = [
        SCRIPTS / "check-jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
    ]
    run([*check, COMPOSE])
    wrong = tmp_path / "compose.yaml"
    wrong.write_text("services: {a: {image: b, program: [c]}}\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="program"):
        run([*check, wrong])


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: str(path.stem))
def test_kubernetes_follows_the_schema(path: Path) -> None:
    for document in load_all(path):
        check_kubernetes(document)


def test_the_schema_of_kubernetes_refuses_what_is_wrong() -> None:
    document = load_all(KUBERNETES[0])[0]
    container = document["spec"]["template"]["spec"]["containers"][0]
    container["program"] = container.pop("command")
    with pytest.raises(kubernetes_validate.ValidationError, match="program"):
        check_kubernetes(document)


def check_kubernetes(document: Any) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_kustomize_has_every_resource_and_config_map(tmp_path: Path) -> None:
    folder = DEPLOY / "kubernetes"
    chosen = load(folder / "kustomization.yaml")
    assert sorted(chosen["resources"]) == [path.name for path in KUBERNETES]
    maps = {made["name"] for made in chosen["configMapGenerator"]}
    text = "".join(path.read_text(encoding="utf-8") for path in KUBERNETES)
    for name in maps:
        assert f"configMapRef: {{name: {name}}}" in text
    kubectl = shutil.which("kubectl")
    if kubectl:
        made = tmp_path / "made.yaml"
        made.write_text(run([kubectl, "kustomize", folder]), encoding="utf-8")
        kinds = [document["kind"] for document in load_all(made)]
        assert kinds.count("Deployment") == 4


def test_images_build_without_a_complaint() -> None:
    run([SCRIPTS / "hadolint", "--no-color", DEPLOY / "Dockerfile"])


@pytest.mark.full
@pytest.mark.venv("sky")
@pytest.mark.parametrize("path", SKYPILOT, ids=lambda path: str(path.stem))
def test_skypilot_parses_its_tasks(path: Path, tmp_path: Path) -> None:
    other, is_replica = "aws/ap-northeast-1", path.stem == "replica"
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin"}
    said = run([SKY, "-c", PARSE_TASK, path, other], ROOT, env=environment)
    region = "eu-central-1" if is_replica else "us-east-1"
    assert f"deltachain-{path.stem} ['{region}'] {is_replica}" in said
    assert "['ap-northeast-1']" in said


def test_replicas_of_skypilot_are_in_two_regions_other_than_the_trainers() -> None:
    infra = {path.stem: load(path)["resources"]["infra"] for path in SKYPILOT}
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    ups = [line for line in text.splitlines() if line.startswith("sky serve up ")]
    named = [re.findall(r"--infra (\S+)", line) or [infra["replica"]] for line in ups]
    assert len({infra["trainer"], *(one for (one,) in named)}) == 3
    assert all(line.endswith(" examples/deploy/skypilot/replica.yaml") for line in ups)


@pytest.mark.full
@pytest.mark.parametrize("path", JOBS, ids=lambda path: str(path.stem))
def test_jobs_resolve(path: Path, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": f"{SCRIPTS}:/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    said = run(["bash", path, "--dry-run"], env=environment)
    assert "Job not submitted" in said
    assert "HF_TOKEN" in said


def test_alerts_are_rules_that_fire_when_they_should(promtool: str) -> None:
    folder = DEPLOY / "prometheus"
    run([promtool, "check", "rules", "alerts.yml"], folder)
    run([promtool, "test", "rules", "alerts_test.yml"], folder)
    run([promtool, "check", "config", "--syntax-only", "prometheus.yml"], folder)


def test_every_alert_is_tried() -> None:
    rules = load(DEPLOY / "prometheus" / "alerts.yml")["groups"][0]["rules"]
    tests = load(DEPLOY / "prometheus" / "alerts_test.yml")["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules}


def test_the_dashboard_is_one_of_grafana() -> None:
    document = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found = Dashboard.from_json(document)
    assert found.uid == "deltachain"
    assert len(found.panels or ()) == len(document["panels"]) > 8
    places = {panel["id"]: panel["gridPos"] for panel in document["panels"]}
    assert len(places) == len(document["panels"])
    assert all(place["x"] + place["w"] <= 24 for place in places.values())
    assert not [pair for pair in combinations(places.values(), 2) if _overlap(*pair)]


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size]
        for at, size in (("x", "w"), ("y", "h"))
    )


def test_prometheus_reads_every_expression_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    document = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    rules = [
        {"record": f"a{n}", "expr": expression.replace("$job", ".*").replace("$instance", ".*")}
        for n, expression in enumerate(expressions)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "a", "rules": rules}]}), encoding="utf-8")
    assert f"{len(expressions)} rules found" in run([promtool, "check", "rules", path])


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


def test_every_value_is_valid() -> None:
    for path in ENVIRONMENTS:
        environment.read(variables(path))
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
    tested = table.TABLE.tested[-1]
    found = named(r"vllm(?:-openai)?(?::v|==)(\d+\.\d+)\.\d+")
    assert set(found) == {tested}

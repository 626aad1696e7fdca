"""The recipes as they lie in ``examples/deploy``, parsed."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[3]
DEPLOY: Final = ROOT / "examples" / "deploy"
COMPOSE: Final = DEPLOY / "compose" / "compose.yaml"
DASHBOARD: Final = DEPLOY / "grafana" / "dashboards" / "deltachain.json"
KUBERNETES: Final = sorted(
    path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.stem != "kustomization"
)
SKYPILOT: Final = sorted((DEPLOY / "skypilot").glob("*.yaml"))
JOBS: Final = sorted((DEPLOY / "hf-jobs").glob("*.sh"))
ENVIRONMENTS: Final = sorted(DEPLOY.rglob("*.env"))
TOOLS: Final = Path.home() / ".cache" / "deltachain" / "prometheus" / "usr" / "bin"


def files() -> Iterator[Path]:
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file() and not {"__pycache__", "secrets"} & set(path.parts):
            yield path


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def load_all(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def services() -> Mapping[str, Any]:
    found: Mapping[str, Any] = load(COMPOSE)["services"]
    return found


def variables(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def containers() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path in KUBERNETES:
        for document in load_all(path):
            template = document["spec"].get("template")
            for container in template["spec"]["containers"] if template else ():
                yield f"{path.stem}/{container['name']}", container


def commands() -> Iterator[tuple[str, Sequence[str]]]:
    for name, service in services().items():
        yield f"compose/{name}", [str(word) for word in service.get("command", ())]
    for name, container in containers():
        yield f"kubernetes/{name}", container["command"]
    for path in SKYPILOT:
        text = load(path)["run"].replace("\\\n", " ").replace("$DELTACHAIN_URL", "s3://b/run-1")
        for line in text.splitlines():
            program, *words = shlex.split(line.rstrip(" &"), comments=True) or [""]
            yield f"skypilot/{path.stem}", [program.rpartition("/")[2], *words]
    for path in JOBS:
        text = path.read_text(encoding="utf-8")
        _, found, rest = text.partition(" deltachain maintain ")
        if found:
            yield f"hf-jobs/{path.stem}", ["deltachain", "maintain", *shlex.split(rest)]

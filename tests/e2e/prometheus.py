"""A real Prometheus, with the configuration and the alert rules of the recipes."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from examples.demo.online.processes import free_port
from tests.unit.deploy.recipes import DEPLOY, TOOLS, load

FOLDER: Final = DEPLOY / "prometheus"
PROMETHEUS: Final = shutil.which("prometheus") or shutil.which("prometheus", path=str(TOOLS))

EVERY: Final = "200ms"

PATIENCE_S: Final = 60.0


@dataclass(frozen=True)
class Prometheus:
    url: str

    def alerts(self) -> set[tuple[str, str]]:
        found = self._get("alerts")["alerts"]
        return {(alert["labels"]["alertname"], alert["state"]) for alert in found}

    def summary(self, name: str) -> str:
        (found,) = [a for a in self._get("alerts")["alerts"] if a["labels"]["alertname"] == name]
        said: str = found["annotations"]["summary"]
        return said

    def health(self) -> list[str]:
        return [target["health"] for target in self._get("targets")["activeTargets"]]

    def _get(self, what: str) -> Mapping[str, Any]:
        answer = httpx.get(f"{self.url}/api/v1/{what}", trust_env=False, timeout=PATIENCE_S)
        answer.raise_for_status()
        found: Mapping[str, Any] = answer.json()["data"]
        return found


@contextmanager
def prometheus(
    folder: Path, replicas: Sequence[str], token: str, *, silence_s: float
) -> Iterator[Prometheus]:
    """A server that scrapes replicas as the recipe does."""
    assert PROMETHEUS is not None
    folder.mkdir()
    (folder / "token").write_text(token, encoding="utf-8")
    (folder / "alerts.yml").write_text(yaml.dump(_hurried(silence_s)), encoding="utf-8")
    (folder / "prometheus.yml").write_text(yaml.dump(_config(folder, replicas)), encoding="utf-8")
    url = f"127.0.0.1:{free_port()}"
    words = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={url}",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            _wait(process, f"http://{url}/-/ready", folder / "log")
            yield Prometheus(f"http://{url}")
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _hurried(silence_s: float) -> Mapping[str, Any]:
    """The rules of the recipe with shorter times."""
    found: dict[str, Any] = load(FOLDER / "alerts.yml")
    for rule in found["groups"][0]["rules"]:
        if "for" in rule:
            rule["for"] = "1s"
        if rule["alert"] == "StoreSilent":
            limit = "deltachain_silence_seconds > 60"
            assert rule["expr"] == limit
            rule["expr"] = limit.replace("60", str(silence_s))
    return found


def _config(folder: Path, replicas: Sequence[str]) -> Mapping[str, Any]:
    """The configuration of the recipe for other machines: replicas alone, scraped more often."""
    found: dict[str, Any] = load(FOLDER / "prometheus.yml")
    found["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout"), EVERY) | {
        "evaluation_interval": EVERY
    }
    found["rule_files"] = [str(folder / name) for name in found["rule_files"]]
    jobs = [job for job in found["scrape_configs"] if job["job_name"] == "replicas"]
    jobs[0]["authorization"]["credentials_file"] = str(folder / "token")
    jobs[0]["static_configs"] = [{"targets": list(replicas)}]
    return found | {"scrape_configs": jobs}


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    limit = time.monotonic() + PATIENCE_S
    while True:
        try:
            if httpx.get(url, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass  # not yet
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.05)

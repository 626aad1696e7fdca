"""The entrypoint with an engine and a ``deltachain`` that only write down how they were called."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.unit.cli.support import (
    State,
    ok,
    random_state,
    read_checkpoint,
    same,
    train,
    write_checkpoint,
)

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
    assert (arguments[:3], arguments[-1]) == (["-m", "pip", "install"], f"{WHEEL}[hf,s3]")
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


ENTRYPOINT: Final = Path(__file__).resolve().parents[3] / "spaces" / "rollout" / "entrypoint.sh"

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for folder in ("bin", "home"):
        (tmp_path / folder).mkdir()
    engine = tmp_path / "bin" / "vllm"
    engine.write_text('#!/usr/bin/bash\necho "serving $2"\n', encoding="utf-8")
    engine.chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{sysconfig.get_path('scripts')}:/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "vllm_ext", ROOT / "sglang_ext"))),
        "ENGINE": "vllm",
        "HOME": str(tmp_path / "home"),
        "DELTACHAIN_URL": str(tmp_path / "chain"),
        "DELTACHAIN_TOKEN": "only-for-this-test",
        "RETRY_S": "0",
    }


@pytest.fixture
def start(environment: dict[str, str]) -> Start:
    def starting(**given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BASH, str(ENTRYPOINT)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=environment | given,
        )

    return starting


def push(root: Path, chain: str, state: State) -> State:
    ok("push", write_checkpoint(root / "trained", state), root / chain)
    return state


@pytest.mark.full
def test_each_start_serves_the_head(tmp_path: Path, start: Start) -> None:
    policy = tmp_path / "home" / "policy"
    first = push(tmp_path, "chain", random_state())
    done = start()
    assert done.stdout.endswith(f"serving {policy}\n"), done.stderr
    assert same(read_checkpoint(policy), first)
    assert (policy / "config.json").is_file()

    head = push(tmp_path, "chain", train(first, 1))
    weights = policy / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    done = start()
    assert done.returncode == 0, done.stderr
    assert "written anew" in done.stderr
    assert same(read_checkpoint(policy), head)


@pytest.mark.full
def test_another_chain_takes_the_folder_over(tmp_path: Path, start: Start) -> None:
    push(tmp_path, "chain", random_state())
    assert start().returncode == 0
    other = push(tmp_path, "other", random_state(1))
    done = start(DELTACHAIN_URL=str(tmp_path / "other"))
    assert done.returncode == 0, done.stderr
    assert same(read_checkpoint(tmp_path / "home" / "policy"), other)


@pytest.mark.full
def test_a_start_that_was_killed_costs_nothing(
    tmp_path: Path, environment: dict[str, str], start: Start
) -> None:
    head = push(tmp_path, "chain", random_state())
    policy = tmp_path / "home" / "policy"
    killed = subprocess.Popen(
        [BASH, str(ENTRYPOINT)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (policy / ".deltachain-lock").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    os.killpg(killed.pid, 9)
    killed.wait()
    with (policy / ".deltachain-lock").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # its child holds it until it has ended
    done = start()
    assert done.returncode == 0, done.stderr
    assert same(read_checkpoint(policy), head)


ROOT: Final = Path(__file__).resolve().parents[3]
SCRIPT: Final = ROOT / "spaces" / "rollout" / "entrypoint.sh"
SCRIPTS: Final = sorted(
    path for folder in ("spaces", "examples") for path in (ROOT / folder).rglob("*.sh")
)
URL: Final = "hf://buckets/me/policy/run-1"
TOKEN: Final = "only-for-this-test"  # noqa: S105
PATIENCE_S: Final = 20.0
BASH: Final = "/usr/bin/bash"

RECORD: Final = """\
import json, os, signal, sys, time
name = os.path.basename(sys.argv[0])
if sys.argv[1:2] == ["-c"]:  # whether there is a module
    sys.exit(int(os.environ.get("STUB_LACKS", "0")))
def write(file, document):
    with open(os.path.join(os.environ["STUBS"], file), "a") as out:
        out.write(json.dumps(document) + "\\n")
write(name, {"argv": sys.argv[1:], "env": dict(os.environ), "stdin": sys.stdin.read(),
             "pid": os.getpid()})
"""

ENGINE_STUB: Final = """
def end(*_):
    write("ended", name)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
if os.environ.get("STUB_STAYS"):
    while True:
        time.sleep(0.05)
"""

PULL_STUB: Final = """
codes = os.path.join(os.environ["STUBS"], "codes")
left = open(codes).read().split()
open(codes, "w").write(" ".join(left[1:]))
code = left[0] if left else "0"
if code == "stay":
    time.sleep(60)
sys.exit(int(code))
"""


@dataclass(frozen=True, slots=True)
class Space:
    name: str
    root: Path

    @property
    def policy(self) -> Path:
        return self.root / "home" / "policy"

    @property
    def engine(self) -> str:
        return "vllm" if self.name == "vllm" else "python3"

    def environment(self, given: Mapping[str, str | None]) -> dict[str, str]:
        settings: dict[str, str | None] = {
            "PATH": f"{self.root / 'bin'}:/usr/bin:/bin",
            "ENGINE": self.name,
            "HOME": str(self.root / "home"),
            "STUBS": str(self.root / "calls"),
            "DELTACHAIN_URL": URL,
            "DELTACHAIN_TOKEN": TOKEN,
            "HF_TOKEN": "hf_test",
            "RETRY_S": "0",
            **given,
        }
        return {name: value for name, value in settings.items() if value is not None}

    def run(
        self, codes: Sequence[int] = (), /, **given: str | None
    ) -> subprocess.CompletedProcess[str]:
        self.plan(*codes)
        return subprocess.run(
            [BASH, str(SCRIPT)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=self.environment(given),
            input="somebody types\n",
        )

    def start(self, *codes: int | str, **given: str | None) -> subprocess.Popen[bytes]:
        self.plan(*codes)
        environment = self.environment(given)
        return subprocess.Popen([BASH, str(SCRIPT)], stderr=subprocess.DEVNULL, env=environment)

    def plan(self, *codes: int | str) -> None:
        (self.root / "calls" / "codes").write_text(" ".join(map(str, codes)), encoding="utf-8")

    def calls(self, name: str) -> list[dict[str, Any]]:
        file = self.root / "calls" / name
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def served(self) -> dict[str, Any]:
        (call,) = self.calls(self.engine)
        return call

    def wait_for(self, name: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.calls(name)):
            assert time.monotonic() < deadline, f"{name} was not called"
            time.sleep(0.05)
        return found[0]


@pytest.fixture(params=["vllm", "sglang"])
def space(request: pytest.FixtureRequest, tmp_path: Path) -> Space:
    for folder in ("bin", "home", "calls"):
        (tmp_path / folder).mkdir()
    found = Space(request.param, tmp_path)
    for name, rest in ((found.engine, ENGINE_STUB), ("deltachain", PULL_STUB), ("hf", "")):
        program = tmp_path / "bin" / name
        program.write_text(f"#!{sys.executable} -IS\n{RECORD}{rest}", encoding="utf-8")
        program.chmod(0o755)
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_shellcheck_finds_nothing(script: Path) -> None:
    program = Path(sysconfig.get_path("scripts")) / "shellcheck"
    assert program.exists(), "pip install --group test"
    done = subprocess.run([program, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_engine_is_started_with_the_flags_of_a_follower(space: Space) -> None:
    done = space.run(ENGINE_ARGS="--max-model-len 4096", API_KEY="sk-1")
    assert done.returncode == 0, done.stderr
    served = space.served()
    host = ["--host", "0.0.0.0", "--port", "7860", "--served-model-name", "policy"]  # noqa: S104
    config = next((word for word in served["argv"] if word.endswith(".yaml")), "")
    expected = {
        "vllm": [
            *("serve", str(space.policy), *host),
            *("--worker-extension-cls", "deltachain_vllm.WorkerExtension"),
            *("--weight-transfer-config", '{"backend": "deltachain"}'),
        ],
        "sglang": [
            *("-m", "sglang.launch_server", "--model-path", str(space.policy), *host),
            *("--config", config),
        ],
    }
    assert served["argv"] == [*expected[space.name], "--max-model-len", "4096"]
    assert (served["env"]["DELTACHAIN_FOLLOW"], served["env"]["DELTACHAIN_URL"]) == ("1", URL)
    assert "DELTACHAIN_BASE" not in served["env"]
    if space.name == "vllm":
        assert served["env"]["VLLM_PLUGINS"] == "deltachain,deltachain_http"
        assert served["env"]["VLLM_API_KEY"] == "sk-1"
    (pull,) = space.calls("deltachain")
    assert pull["argv"] == ["pull", URL, "--out", str(space.policy)]
    for call in (pull, served):
        assert call["stdin"] == "", "nobody is asked anything"
        assert not any(one in word for one in (TOKEN, "hf_test", "sk-1") for word in call["argv"])


@pytest.mark.parametrize("key", ["sk-1", "a'b", "a: b # c", '"', "{x}", "- 1", "0x10"])
def test_sglang_finds_its_key_in_a_file_for_this_user_alone(space: Space, key: str) -> None:
    space.run(API_KEY=key)
    if space.name == "sglang":
        argv = space.served()["argv"]
        file = Path(argv[argv.index("--config") + 1])
        try:
            assert yaml.safe_load(file.read_text(encoding="utf-8")) == {"api-key": key}
            assert file.stat().st_mode & 0o777 == 0o600
        finally:
            file.unlink()


def test_a_second_file_of_arguments_is_refused_since_sglang_takes_one(space: Space) -> None:
    done = space.run(API_KEY="sk-1", ENGINE_ARGS="--config mine.yaml")
    assert done.returncode == (2 if space.name == "sglang" else 0)
    assert ("write api-key into that file" in done.stderr) is (space.name == "sglang")


def test_a_file_of_tokens_is_enough(space: Space) -> None:
    done = space.run(DELTACHAIN_TOKEN=None, DELTACHAIN_TOKEN_FILE="/run/token")  # noqa: S106
    assert done.returncode == 0, done.stderr
    done = space.run(DELTACHAIN_TOKEN=None)
    assert done.returncode == 2
    assert "DELTACHAIN_TOKEN_FILE" in done.stderr


def test_plugins_that_are_named_already_stay(space: Space) -> None:
    space.run(VLLM_PLUGINS="mine", SGLANG_PLUGINS="mine")
    env = space.served()["env"]
    if space.name == "vllm":
        assert env["VLLM_PLUGINS"] == "mine,deltachain,deltachain_http"
    else:
        assert env["SGLANG_PLUGINS"] == "mine,deltachain"


def test_engine_arguments_are_words_and_never_code(space: Space) -> None:
    given = """--a 'two words' --b '{"c": "d"}' "$(touch x)" `touch x` ; touch x\n--last"""
    done = space.run(ENGINE_ARGS=given)
    assert done.returncode == 0, done.stderr
    argv = space.served()["argv"]
    words = ["--a", "two words", "--b", '{"c": "d"}', "$(touch x)", "`touch", "x`", ";", "touch"]
    assert argv[-11:] == [*words, "x", "--last"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ENGINE": None}, "ENGINE is ''"),
        ({"ENGINE": "tgi"}, "ENGINE is 'tgi'"),
        ({"ENGINE": "./vllm"}, "ENGINE is './vllm'"),
        ({"DELTACHAIN_URL": None}, "DELTACHAIN_URL is not set"),
        ({"DELTACHAIN_URL": ""}, "DELTACHAIN_URL is not set"),
        ({"DELTACHAIN_TOKEN": None}, "DELTACHAIN_TOKEN is not set"),
        ({"PORT": "http"}, "PORT is 'http'"),
        ({"WAIT_S": "1h"}, "WAIT_S is '1h'"),
        ({"ENGINE_ARGS": "--a 'b"}, "ENGINE_ARGS cannot be split"),
        ({"POLICY_DIR": "/dev/null/policy"}, "/dev/null/policy cannot be written to"),
    ],
)
def test_a_setting_that_is_missing_or_wrong_is_named(
    space: Space, given: dict[str, str | None], message: str
) -> None:
    done = space.run(**given)
    assert done.returncode == 2
    assert f"error  {message}" in done.stderr
    assert "\nhint   " in done.stderr
    assert space.calls("deltachain") == space.calls(space.engine) == []


def test_an_image_of_the_other_engine_is_refused(space: Space) -> None:
    if space.name == "vllm":
        (space.root / "bin" / "vllm").unlink()
    done = space.run(STUB_LACKS="1")
    assert done.returncode == 2
    assert f"error  this image has no {space.name}\nhint   " in done.stderr
    assert space.calls("deltachain") == []


def test_a_chain_in_s3_needs_no_token_of_the_hub(space: Space) -> None:
    done = space.run(DELTACHAIN_URL="s3://bucket/run-1", HF_TOKEN=None)
    assert done.returncode == 0, done.stderr
    assert "HF_TOKEN" not in done.stderr
    assert space.calls("deltachain")[0]["argv"][:2] == ["pull", "s3://bucket/run-1"]


def test_a_public_bucket_needs_no_token(space: Space) -> None:
    done = space.run(HF_TOKEN=None)
    assert (done.returncode, "HF_TOKEN is not set" in done.stderr) == (0, True)
    assert "HF_TOKEN" not in space.run(DELTACHAIN_URL="/mnt/policy", HF_TOKEN=None).stderr


def test_a_chain_that_is_not_there_yet_is_waited_for(space: Space) -> None:
    done = space.run((3, 4, 3))
    assert done.returncode == 0, done.stderr
    assert len(space.calls("deltachain")) == 4
    assert space.served()


def test_waiting_ends(space: Space) -> None:
    done = space.run((3, 3), WAIT_S="0")
    assert (done.returncode, len(space.calls("deltachain"))) == (3, 1)
    assert "nothing to serve after 0 s" in done.stderr
    assert space.calls(space.engine) == []


@pytest.mark.parametrize("code", [1, 2, 5, 6])
def test_what_waiting_does_not_mend_ends_the_start(space: Space, code: int) -> None:
    assert space.run((code,)).returncode == code
    assert len(space.calls("deltachain")) == 1
    assert space.calls(space.engine) == []


@pytest.mark.parametrize("code", [4, 5, 6])
def test_a_folder_that_nobody_can_use_is_filled_anew(space: Space, code: int) -> None:
    space.policy.mkdir()
    for name in ("deltachain.json", ".deltachain-journal", "model.safetensors"):
        (space.policy / name).write_text("broken", encoding="utf-8")
    done = space.run((code,))
    assert done.returncode == 0, done.stderr
    assert list(space.policy.iterdir()) == []
    assert len(space.calls("deltachain")) == 2


@pytest.mark.parametrize("code", [2, 5, 6])
def test_a_folder_of_somebody_else_is_left_alone(space: Space, code: int) -> None:
    space.policy.mkdir()
    (space.policy / "model.safetensors").write_text("mine", encoding="utf-8")
    assert space.run((code,)).returncode == code
    assert (space.policy / "model.safetensors").read_text(encoding="utf-8") == "mine"


def test_the_policy_may_be_kept_elsewhere_under_another_name(space: Space) -> None:
    folder = space.root / "a volume"
    space.run(POLICY_DIR=str(folder), MODEL_NAME="mine", HOST="127.0.0.1", PORT="8000")
    argv = space.served()["argv"]
    assert {str(folder), "mine", "127.0.0.1", "8000"} <= set(argv)
    assert not {"policy", "0.0.0.0", "7860"} & set(argv)  # noqa: S104


def test_a_base_may_be_a_folder(space: Space) -> None:
    base = space.root / "base"
    base.mkdir()
    space.run(MODEL=str(base))
    assert space.calls("deltachain")[0]["argv"][-2:] == ["--base", str(base)]
    assert space.served()["env"]["DELTACHAIN_BASE"] == str(base)
    assert space.calls("hf") == []


def test_a_base_may_be_a_repo_at_a_revision(space: Space) -> None:
    space.run(MODEL="me/model", MODEL_REVISION="abc")
    base = str(space.root / "home" / "base")
    expected = ["download", "me/model", "--revision", "abc", "--local-dir", base, "--quiet"]
    assert space.calls("hf")[0]["argv"] == expected
    assert space.calls("deltachain")[0]["argv"][-2:] == ["--base", base]
    assert space.served()["env"]["DELTACHAIN_BASE"] == base


def test_signals_reach_the_engine(space: Space) -> None:
    process = space.start(STUB_STAYS="1")
    try:
        assert space.wait_for(space.engine)["pid"] == process.pid
        time.sleep(0.3)  # until the stub has its handler
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert space.calls("ended")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("code", ["stay", 3], ids=["pulling", "waiting"])
def test_a_start_is_ended_with_the_container(space: Space, code: int | str) -> None:
    process = space.start(code, RETRY_S="60")
    try:
        pulling = space.wait_for("deltachain")["pid"]
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143
        assert not Path(f"/proc/{pulling}").exists()
    finally:
        process.kill()
        process.wait()

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from rich.cells import cell_len
from safetensors.numpy import save_file

import deltachain
from deltachain.chain import identity as mirror_record
from deltachain.cli import console
from deltachain.cli import console as c
from deltachain.cli.app import MEANT, PANELS, explain
from deltachain.cli.console import clean, count, moment, nbytes, percent
from deltachain.errors import ConfigError, StoreUnavailableError
from deltachain.store import calls as outage
from deltachain.store import open_store
from tests.unit.cli.support import (
    Done,
    Pushed,
    Running,
    contents,
    invoke,
    ok,
    random_state,
    read_checkpoint,
    refused,
    running,
    same,
    train,
    write_checkpoint,
)

Words = Callable[[Path, Path], list[object]]

LONG_COMMANDS: dict[str, Words] = {
    "follow": lambda url, new: ["follow", url, "--out", new, "--poll", 0.1, "--json"],
    "mirror": lambda url, new: ["mirror", url, new, "--follow", "--poll", 0.1, "--json"],
    "maintain": lambda _, new: ["maintain", new, "--every", "1s"],  # says that it waits for a chain
}


def first_line(process: Running, name: str) -> str:
    """The first line of a command, printed once it handles signals."""
    return process.line() if name in ("follow", "mirror") else process.error_line()


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize("name", LONG_COMMANDS)
def test_ctrl_c_is_130_and_sigterm_is_0(
    pushed: Pushed, tmp_path: Path, name: str, number: signal.Signals, code: int
) -> None:
    with running(*LONG_COMMANDS[name](pushed.url, tmp_path / "new")) as process:
        first_line(process, name)
        done = process.end(number)
    assert done.code == code, done.stderr
    assert "Traceback" not in done.stderr


IN_A_WAIT = """
import signal
from threading import Event
from deltachain.cli.serving import stopping
stop, woken = Event(), Event()
with stopping(stop, woken.set) as by:
    with stop._cond:  # as Event.wait has it for a moment, between two bytecodes
        signal.raise_signal(signal.SIGINT)
    assert stop.wait(60) and woken.wait(60)
assert by == [signal.SIGINT]
"""


def test_a_signal_may_come_in_the_middle_of_a_wait() -> None:
    subprocess.run([sys.executable, "-c", IN_A_WAIT], check=True, timeout=120)


CANARY = "canary7secret"
RECORDS = {
    "a record": json.dumps(
        {
            "format": 1,
            "chain": "0" * 32,
            "source": f"s3://u:{CANARY}@b/x\n  hint: \u202ecall 1\x1b[2J" + "y" * 999,
        }
    ).encode(),
    "a damaged record": b"{",
    "a record of another format": b'{"chain": 1}',
}


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    key = tmp_path / "key"
    ok("keygen", key)
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(key))
    state = random_state()
    for number in range(3):
        state = train(state, number)
        write_checkpoint(tmp_path / f"step-{number}", state)
        if number < 2:
            ok("push", tmp_path / f"step-{number}", tmp_path / "chain", "--step", number)
    return tmp_path / "chain"


def run(command: str, url: Path) -> Done:
    name, *options = command.split()
    if name == "push":
        return invoke("push", url.parent / "step-2", url)
    return invoke(name, url, *options)


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize(
    "command",
    ["push", "tag good", "prune", "anchor", "maintain --once", "revert --version 0", "sign"],
)
def test_writers_of_a_signed_chain_warn_of_a_mirror_record_and_go_on(
    url: Path, command: str, record: str
) -> None:
    mirror_record._told.clear()
    (url / "mirror.json").write_bytes(RECORDS[record])
    done = run(command, url)
    assert done.code == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if "mirror" in line]
    assert warning.startswith("warning  ")
    assert "nobody signed" in warning
    assert CANARY not in done.stderr
    assert console.clean(done.stderr) == done.stderr
    assert len(warning) < 1500


@pytest.fixture
def unsigned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for number in range(3):
        write_checkpoint(tmp_path / f"step-{number}", random_state(number))
    ok("push", tmp_path / "step-0", tmp_path / "chain")
    ok("keygen", tmp_path / "key")
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(tmp_path / "key"))
    return tmp_path / "chain"


@pytest.mark.parametrize("command", ["push", "tag good", "sign"])
def test_writers_of_an_unsigned_chain_refuse_a_mirror_and_show_nothing_secret(
    unsigned: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (unsigned / "mirror.json").write_bytes(RECORDS["a record"])
    if command != "sign":
        monkeypatch.delenv("DELTACHAIN_SIGNING_KEY")
    before = contents(unsigned)
    done = run(command, unsigned)
    assert done.code == 2
    assert contents(unsigned) == before
    assert "is a mirror of s3://b/x" in done.stderr
    assert CANARY not in done.stderr
    assert len(done.stderr.splitlines()) == 3


ROOT: Final = Path(__file__).parents[3]

HIDE: Final = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""

RUN: Final = "from deltachain.cli import main; main()"


def python(code: str, *args: object, first: str = "") -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, which finds modules in a folder first."""
    paths = (first, ROOT, ROOT / "vllm_ext", ROOT / "sglang_ext")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths)))}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def without_torch(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process that cannot import torch."""
    return python(HIDE + code, *args)


LIGHT_COMMANDS: Final = {
    "log": ("log", "{chain}"),
    "verify": ("verify", "{chain}"),
    "inspect": ("inspect", "{chain}", "--table"),
    "pull": ("pull", "{chain}", "--out", "{out}/pulled"),
    "revert": ("revert", "{chain}", "--to", "1"),
    "follow": ("follow", "{chain}", "--out", "{out}/followed", "--once"),
    "doctor": ("doctor", "{chain}"),
    "fleet": ("fleet", "--help"),
    "agent": ("agent", "--help"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LIGHT_COMMANDS)
def test_a_command_needs_no_torch(pushed: Pushed, tmp_path: Path, name: str) -> None:
    places = {"chain": pushed.url, "out": tmp_path}
    done = without_torch(RUN, *(part.format(**places) for part in LIGHT_COMMANDS[name]))
    assert done.returncode == 0, done.stderr


AWAY: Final = "http://127.0.0.1:9"


def test_a_fleet_that_is_away_is_not_a_lack_of_torch() -> None:
    done = without_torch(RUN, "fleet", "status", AWAY, "--json")
    assert done.returncode not in (0, 1)
    assert "torch" not in done.stderr
    assert "127.0.0.1:9" in done.stdout + done.stderr


@pytest.mark.full
def test_an_agent_pulls_and_waits_for_its_server(pushed: Pushed, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = ("agent", pushed.url, "--engine", AWAY, "--out", tmp_path / "out")
    with running(*words, PYTHONPATH=paths) as agent:
        assert "did not answer" in agent.error_line()


def test_a_package_needs_no_torch() -> None:
    done = without_torch("import deltachain.control")
    assert done.returncode == 0, done.stderr
    assert without_torch("import torch").returncode == 1


BROKEN: Final = {
    "missing library": 'raise ImportError("libcudart.so.12: cannot open shared object file")',
    "loader": 'raise OSError("libcudnn.so.9: cannot open shared object file")',
    "other numpy": 'raise AttributeError("_ARRAY_API not found")',
    "missing package": "import no_such_package_of_torch",
}


def with_torch(folder: Path, body: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process with another torch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(body)
    return python(RUN, *args, first=str(folder))


@pytest.mark.full
@pytest.mark.parametrize("name", BROKEN)
def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path, name: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "one", random_state())
    done = with_torch(tmp_path, BROKEN[name], "push", checkpoint, tmp_path / "chain")
    assert done.returncode == 2, done.stderr
    assert "torch is installed, and cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_torch_that_cannot_be_imported_is_a_fault_of_a_publisher(tmp_path: Path) -> None:
    body = BROKEN["missing library"]
    done = with_torch(tmp_path, body, "doctor", tmp_path / "chain", "--as", "publisher")
    assert done.returncode == 1
    assert "cannot be imported: ImportError: libcudart.so.12" in done.stdout.replace("\n", " ")


@pytest.mark.full
def test_a_torch_that_is_too_old_is_named() -> None:
    code = "import torch\ndel torch.float8_e8m0fnu\ntorch.__version__ = '2.5.1'\n"
    code += "import deltachain\ntry:\n    deltachain.attach\n"
    code += "except deltachain.DeltaChainError as error:\n    print(error)"
    done = python(code)
    assert "torch 2.5.1 is older than 2.7" in done.stdout, done.stderr
    assert 'pip install "torch>=2.7"' in done.stdout


@pytest.mark.parametrize("columns", [30, 40, 60])
@pytest.mark.parametrize(
    "words", [["stats"], ["verify"], ["inspect"], ["inspect", "--table"], ["log"]]
)
def test_no_unit_is_cut(
    pushed: Pushed, monkeypatch: pytest.MonkeyPatch, words: list[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    command, *options = words
    shown = ok(command, pushed.url, *options).stdout
    assert "…" not in shown
    tables = [line for line in shown.splitlines() if not line.startswith("✓")]
    assert max(map(cell_len, tables)) <= columns
    assert " B" in shown or " kB" in shown


def rows(width: int, *give_way: str) -> list[str]:
    cells = ("weights of a layer", "1.25 kB", "12.5 %", c.bar(0.5, 10))
    grid = c.table(("name", ">bytes", ">share", ""), [cells], *give_way, width=width)
    console = c.out()
    with console.capture() as captured:
        console.print(grid, width=width)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_bar_gives_way_first_then_columns_in_turn() -> None:
    assert rows(60, "share")[1].split("  ")[-1].startswith("█")
    assert rows(36, "share") == [
        "name                  bytes   share",
        "weights of a layer  1.25 kB  12.5 %",
    ]
    assert rows(30, "share") == ["name                  bytes", "weights of a layer  1.25 kB"]


def test_cells_are_folded_where_no_column_is_left_to_leave_out() -> None:
    shown = " ".join(" ".join(rows(20, "share")).split())
    assert "…" not in shown
    assert all(word in shown for word in ("weights", "layer", "1.25 kB"))


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["push", "--help"]])
def test_help_and_version_load_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys, contextlib, io\n"
        f"sys.argv = ['deltachain', *{args!r}]\n"
        "from deltachain.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main()\n"
        "print({'torch', 'numba', 'numpy', 'transformers'} & sys.modules.keys())"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_results_are_printed_in_any_encoding(pushed: Pushed, tmp_path: Path, encoding: str) -> None:
    def run(*words: object) -> bytes:
        done = subprocess.run(
            [sys.executable, "-m", "deltachain", *map(str, words)],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
            check=False,
        )
        told = b"info  compiling kernels, which takes seconds once on this machine\n"
        assert done.returncode == 0, done.stderr.decode()
        assert done.stderr in {b"", told}
        return done.stdout

    folder = tmp_path / "é 名"
    tick = "✓" if encoding == "utf-8" else "?"
    assert run("pull", pushed.url, "--out", folder).decode(encoding).startswith(f"{tick}  version")
    assert ("█" if encoding == "utf-8" else "?") in run("stats", pushed.url).decode(encoding)
    told = json.loads(run("pull", pushed.url, "--out", folder, "--json"))
    assert told["out"] == str(folder)


def test_a_missing_extra_is_named() -> None:
    done = without_torch(RUN, "push", "x", "y")
    assert done.returncode == 2
    assert "pip install 'deltachain[torch]'" in done.stderr


def test_version() -> None:
    assert ok("--version").stdout.strip() == f"deltachain {deltachain.__version__}"


def test_errors_go_to_stderr_with_their_hint_and_exit_code(tmp_path: Path) -> None:
    assert refused("log", "nonsense://bucket/chain", code=2, said="hint").stdout == ""
    refused("inspect", tmp_path / "nothing.safetensors", code=3)
    refused("nonsense", code=2)
    refused("pull", "x", code=2)


def test_errors_of_the_file_system_are_told_with_a_hint() -> None:
    explained = explain(FileNotFoundError(errno.ENOENT, "No such file or directory", "absent/d"))
    assert explained is not None
    assert (explained.exit_code, explained.args) == (1, ("absent/d: No such file or directory",))
    assert "check the path" in explained.hint
    explained = explain(MemoryError())
    assert explained is not None
    assert (explained.exit_code, explained.args) == (1, ("out of memory",))


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path) -> None:
    for args in (["--debug", "log", str(tmp_path)], ["log", str(tmp_path), "--debug"]):
        done = refused(*args, code=3, said="Traceback")
        assert "NoChainError" in done.stderr.splitlines()[-3]


def test_ctrl_c_is_answered_with_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltachain.store.open_store", interrupted)
    done = invoke("log", tmp_path)
    assert (done.code, done.stdout) == (130, "")
    assert "interrupted" in done.stderr


def test_a_version_a_line_while_following(pushed: Pushed, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ok("pull", pushed.url, "--version", 0, "--out", out)
    done = ok("follow", pushed.url, "--out", out, "--once", "--every-version", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["version"] for line in lines] == [1, 2, 3]
    assert same(read_checkpoint(out), pushed.states[3])
    assert ok("follow", pushed.url, "--out", out, "--once", "--json").stdout == ""


def test_figures_are_short_and_never_hide_what_is_there() -> None:
    assert [nbytes(n) for n in (0, 999, 1000, 1_520_000, 999_999)] == [
        "0 B", "999 B", "1.00 kB", "1.52 MB", "1.00 MB",
    ]  # fmt: skip
    assert [count(n) for n in (0, 999, 12_345, 7 * 10**9)] == ["0", "999", "12.3 k", "7.00 G"]
    assert [percent(x) for x in (0.0, 1e-9, 0.0123, 1.0)] == ["0 %", "<0.01 %", "1.23 %", "100 %"]
    assert clean("a\x1b[31mb\u202e") == "a\ufffd[31mb\ufffd"


def test_a_time_of_another_year_shows_the_year() -> None:
    now = time.localtime()
    today = time.mktime((now.tm_year, now.tm_mon, now.tm_mday, 9, 5, 0, 0, 0, -1))
    assert moment(today) == time.strftime("%d %b 09:05", now)
    then = time.mktime((now.tm_year - 2, 11, 24, 3, 49, 0, 0, 0, -1))
    assert moment(then) == f"24 Nov {now.tm_year - 2}"


@pytest.mark.parametrize("word", MEANT)
def test_a_guessed_command_is_answered_with_ours(word: str) -> None:
    refused(word, "/mnt/policy", code=2, said=f"unknown command '{word}'")
    ours = set(re.findall(r"`(?:deltachain )?([a-z]+)", MEANT[word])) - {"deltachain", "python"}
    assert ours or "--version" in MEANT[word]
    assert ours <= {function.__name__ for panel in PANELS.values() for function in panel}


# Wrong calls: each is told what is wrong with it, and what to do


def test_versions_in_the_wrong_order_are_told_as_such(pushed: Pushed) -> None:
    done = refused("verify", pushed.url, "--from", 3, "--to", 1, code=2, said="hint")
    assert "version 3, the first to verify, is after version 1" in done.told
    for more in ((), ("--to", 1)):
        done = refused("verify", pushed.url, "--from", 9, *more, code=4)
        assert "version 9 is not committed, head is 3" in done.told


@pytest.mark.parametrize("command", ["push", "inspect"])
def test_a_file_that_is_no_safetensors_file_is_told_as_such(tmp_path: Path, command: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "tiny", "layers": list(range(20))}))
    done = refused(command, file, *([tmp_path / "chain"] if command == "push" else []), code=5)
    assert "not a safetensors file" in done.told
    assert "name a safetensors file" in done.told
    assert "publisher" not in done.stderr


def test_a_checkpoint_with_an_empty_tensor_is_not_pushed(tmp_path: Path) -> None:
    """No edge gives any of it, so nobody could pull the chain."""
    save_file({"a": np.zeros((0, 4)), "b": np.ones(3)}, tmp_path / "model.safetensors")
    refused("push", tmp_path, tmp_path / "chain", code=2, said=("'a' is empty", "hint"))
    assert not (tmp_path / "chain").exists()


@pytest.mark.parametrize("name", ["b", "ab", "-bucket", "bucket-"])
def test_a_name_that_no_bucket_has_is_named(name: str) -> None:
    refused("log", f"s3://{name}/x", code=2, said=(f"'{name}' is no name of a bucket", "3 to 63"))


DEAD = "http://127.0.0.1:9"
OPTIONS: dict[str, Any] = {"key": "key", "secret": "hunter2", "region": "us-east-1"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder without new folders")
def test_a_folder_that_cannot_be_made_is_told_as_such(tmp_path: Path) -> None:
    done = refused("push", write_checkpoint(tmp_path / "a", random_state()), "/proc/absent", code=3)
    assert "the folder cannot be created" in done.told
    assert "deleting" not in done.stderr


def test_a_follower_that_ends_before_there_is_a_chain_holds_no_version(tmp_path: Path) -> None:
    words = ("follow", tmp_path / "chain", "--out", tmp_path / "out", "--poll", "0.1")
    with running(*words) as follower:
        waits = follower.error_line()
        done = follower.end(signal.SIGTERM)
    assert done.code == 0, done.stderr
    assert "info" in waits
    assert "waiting for the first one" in waits
    assert "holds no version: the chain had none yet" in waits + done.stderr
    assert "None" not in waits + done.stderr


def test_an_error_of_a_command_with_json_is_json(tmp_path: Path) -> None:
    done = invoke("log", tmp_path / "absent", "--json")
    assert (done.code, done.stdout) == (3, "")
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (error["type"], error["exit_code"]) == ("NoChainError", 3)
    assert error["hint"]
    assert "chain.json" in error["message"]
    assert error["retryable"] is False


@pytest.mark.parametrize("command", ["log", "push", "fleet", "keygen"])
@pytest.mark.parametrize("variable", [("DELTACHAIN_FOLOW", "1"), ("DELTACHAIN_POLL_S", "often")])
def test_a_mistake_in_the_environment_ends_every_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, variable: tuple[str, str]
) -> None:
    monkeypatch.setenv(*variable)
    more = {"push": ["a", "b"], "fleet": ["status", "http://127.0.0.1:9"]}
    refused(command, *more.get(command, [tmp_path / "file"]), code=2, said=f"{variable[0]} is")
    assert list(tmp_path.iterdir()) == []
    assert ok(command, "--help").stdout


def test_the_library_refuses_a_mistake_in_the_environment_too(
    monkeypatch: pytest.MonkeyPatch, pushed: Pushed, tmp_path: Path
) -> None:
    from deltachain import Subscriber  # noqa: PLC0415
    from deltachain.subscribe.targets.folder import OwnFolder  # noqa: PLC0415

    monkeypatch.setenv("DELTACHAIN_FOLOW", "1")
    with (
        pytest.raises(ConfigError, match="DELTACHAIN_FOLOW"),
        Subscriber(str(pushed.url), OwnFolder(tmp_path / "out")) as subscriber,
    ):
        subscriber.update()


@pytest.mark.parametrize("command", [c for row in PANELS.values() for c in row])
def test_help_is_whole_at_80_columns_with_an_example_and_arguments_in_upper_case(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., None]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = command.__name__.replace("_", "-")
    shown = ok(name, "--help").stdout
    assert f"Example: deltachain {name}" in shown
    assert "…" not in shown
    usage = next(line for line in shown.splitlines() if "Usage" in line)
    named = usage.split(f" {name} ")[1].split()
    assert named == [one.upper() for one in named]
    assert not {"{", "}"} & set(usage)


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("fleet", "fleet [OPTIONS] VERB [ENGINE...]"),
        ("mirror", "mirror [OPTIONS] SRC [DST]"),
        ("inspect", "inspect [OPTIONS] FILE|URL"),
        ("tag", "tag [OPTIONS] URL [NAME]"),
        ("agent", "agent [OPTIONS] URL"),
    ],
)
def test_usage_names_arguments_as_the_documents_do(
    name: str, usage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = next(line for line in ok(name, "--help").stdout.splitlines() if "Usage" in line)
    assert shown.split(" deltachain ")[1].strip() == usage


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "the option"])
def test_a_wrong_endpoint_is_given_up_soon_and_its_variable_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(outage, "FIRST_S", 0.3)
    monkeypatch.setattr(outage, "REPORT_S", 0.1)
    options = OPTIONS | {"deadline_s": 3600.0}
    if name == "the option":
        options["endpoint_url"] = DEAD
    else:
        monkeypatch.setenv(name, DEAD)
    store = open_store("s3://bucket/run", options)
    where = "of the option" if name == "the option" else f"in {name}"
    for _ in range(2):
        with pytest.raises(StoreUnavailableError) as caught:
            store.find("a")
        assert f"nothing answers at {DEAD}, the endpoint {where}" in str(caught.value)
        assert "check host and port of the endpoint" in caught.value.hint
        assert caplog.text.count("trying again for") == 1  # once is enough
        assert "hunter2" not in str(caught.value) + caplog.text
    store.close()

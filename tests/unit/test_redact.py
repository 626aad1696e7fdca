import io
import json
import logging
import os
import pickle
import re
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltachain import errors
from deltachain.cli import console
from deltachain.environment import VARIABLES
from deltachain.errors import (
    ConfigError,
    DeltaChainError,
    DigestMismatchError,
    UnsupportedModelError,
)
from deltachain.log_lines import LOGGERS, show
from deltachain.redact import hidden_parts, redacted_path, redacted_text, redacted_url
from tests.unit.cli.support import COMMAND, invoke


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What an engine shows through a logger of its own, by message alone."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    engine, text = logging.getLogger("some_engine"), io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(message)s"))
    monkeypatch.setattr(engine, "handlers", [handler])
    monkeypatch.setattr(engine, "propagate", False)
    for _ in range(2):
        show(engine, logging.INFO)
    return text


@pytest.mark.parametrize(
    ("logger", "message", "shown"),
    [
        ("deltachain.subscribe.subscriber", "version %d", "deltachain: version 7\n"),
        ("deltachain_sglang.start_check", "number %d", "deltachain: number 7\n"),
        ("deltachain_vllm", "deltachain follows %d", "deltachain follows 7\n"),
    ],
)
def test_each_line_has_our_name_once(
    log: io.StringIO, logger: str, message: str, shown: str
) -> None:
    logging.getLogger(logger).info(message, 7)
    assert log.getvalue() == shown


def test_what_is_below_the_level_or_of_a_logger_that_somebody_set_up_is_not_shown(
    log: io.StringIO,
) -> None:
    logging.getLogger("deltachain.store").debug("a request")
    own = logging.getLogger("deltachain")
    own.handlers = [logging.NullHandler()]
    show(logging.getLogger("some_engine"), logging.INFO)
    own.info("for its own handlers")
    assert log.getvalue() == ""


def family(kind: type[DeltaChainError]) -> Iterator[type[DeltaChainError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from family(child)


def made(kind: type[DeltaChainError]) -> DeltaChainError:
    """An error of a kind, with every attribute its own."""
    if kind is DigestMismatchError:
        error: DeltaChainError = DigestMismatchError("m", expected="a", actual="b", hint="h")
    else:
        error = kind("m", hint="h")
    for number, name in enumerate(vars(error)):
        setattr(error, name, f"{name} {number}")
    return error


@pytest.mark.parametrize("kind", list(family(DeltaChainError)))
def test_errors_survive_the_way_to_another_process(kind: type[DeltaChainError]) -> None:
    error = made(kind)
    found = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(found) is kind
    assert (found.args, vars(found)) == (error.args, vars(error))
    assert str(found) == str(error)


def test_the_tree_in_the_docstring_has_every_class_of_the_module_in_its_place() -> None:
    classes = {c for c in vars(errors).values() if isinstance(c, type)}
    assert set(family(DeltaChainError)) == {c for c in classes if issubclass(c, DeltaChainError)}
    assert len(classes) > 20
    drawn = [line for line in (errors.__doc__ or "").splitlines() if "── " in line]
    depths = {line.split("── ")[1].split()[0]: (line.index("── ") - 1) // 4 for line in drawn}
    names = {kind.__name__ for kind in family(DeltaChainError)} - {"DeltaChainError"}
    assert depths.keys() == names
    for kind in family(DeltaChainError):
        if kind is not DeltaChainError:
            parents = [base for base in kind.__mro__ if base.__name__ in names]
            assert depths[kind.__name__] == len(parents), kind


def anchor_of(heading: str) -> str:
    """The name of a heading in links to it."""
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", list(family(DeltaChainError)))
def test_the_page_of_an_error_is_there_and_names_the_error(kind: type[DeltaChainError]) -> None:
    page, heading = kind.page.removeprefix(f"{errors.DOCS}/").split("#")
    text = (ROOT / "docs" / page).read_text("utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    title = next(one for one in headings if anchor_of(one) == heading)
    assert kind.__name__ in title + text.split(f"# {title}\n")[1].split("\n#")[0]
    error = made(kind)
    error.hint = "h"
    assert str(error).endswith(f"\n  hint: h\n  page: {kind.page}")


def test_pages_lie_where_the_package_says(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["urls"]["Documentation"] == errors.DOCS
    error = UnsupportedModelError("m", hint="h")
    console.say_error(error)
    assert capsys.readouterr().err == f"error  m\nhint   h\npage   {error.page}\n"
    console.say_error(error, as_json=True)
    assert json.loads(capsys.readouterr().err)["error"]["page"] == error.page


CANARY = "canary7secret"
HOST = "127.0.0.1:9"
"""Nothing answers here."""


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"http://user:{CANARY}@h:1/x?token={CANARY}#{CANARY}", "http://h:1/x"),
        (f"http://h?token=a@{CANARY}", "http://..."),
        (f"http://u:{CANARY}/{CANARY}@h", "http://..."),
        (f"http://u:{CANARY}#{CANARY}@h", "http://..."),
        (f"http://a,http://u:{CANARY}@b", "http://..."),
        (f"http://u:{CANARY}@h:{CANARY}", "http://..."),
        ("http://[::1]:80/x", "http://[::1]:80/x"),
        (f"u:{CANARY}@h:80", "...@h:80"),
        (f"dns://{CANARY}@name:80", "dns://name:80"),
        (f"//u:{CANARY}@h/x", "...@h/x"),
        (f"http://h:9/;t={CANARY}", "http://h:9/"),
        (f"http://h:9/x&t={CANARY}", "http://h:9/x"),
        (f"http://u%3A{CANARY}%40h/", "http://..."),
        ("/mnt//a@b", "/mnt//a@b"),
        (f"sftp://user:{CANARY}@h/x", "sftp://user@h/x"),
        ("abfs://container@account/x", "abfs://container@account/x"),
        ("s3://bucket/run@1", "s3://bucket/run@1"),
        ("hf://buckets/a/b", "hf://buckets/a/b"),
        ("/mnt/a@b", "/mnt/a@b"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


OPEN_TEXTS = (
    "write dns://NAME:PORT, or http://HOST:PORT",
    "https://host/page.md#heading",
    "weights: none",
)


def test_a_path_is_shown_if_it_leads_somewhere(tmp_path: Path) -> None:
    assert redacted_path(tmp_path) == str(tmp_path)
    assert redacted_path(tmp_path / "absent") == str(tmp_path / "absent")
    for secret in (CANARY, f"-----BEGIN\n{CANARY}", f"{CANARY}/{CANARY}", "\0", "x" * 5000):
        assert redacted_path(Path(secret)) == "..."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"no folder 'http:/u:{CANARY}@h/x'", "no folder 'http:/h/x'"),
        (f"at s3://u:{CANARY}@h/x, then http://h?t={CANARY}.", "at s3://h/x, then http://h."),
        *((text, text) for text in OPEN_TEXTS),
    ],
)
def test_urls_in_a_text_are_shown_without_what_may_be_secret(text: str, shown: str) -> None:
    assert redacted_text(text) == shown
    error = ConfigError(text, hint=text)
    assert (error.args[0], error.hint) == (shown, shown)


PORT = f"port {CANARY!r} of the token"


@pytest.mark.parametrize(
    ("word", "said", "shown"),
    [
        (f"http://user:{CANARY}/x@h", PORT, "port '...' of the token"),
        (f"--engine=http://h?token={CANARY}", PORT, "port '...' of the token"),
        ("http://user:canary7%73ecret@h", PORT, "port '...' of the token"),
        (f"user:{CANARY}@h", PORT, "port '...' of the token"),
        (f"u:{CANARY}@h/x", f"file:///u%3A{CANARY}%40h/x is gone", "file:///u%3A...%40h/x is gone"),
    ],
)
def test_parts_that_are_hidden_in_a_url_are_hidden_wherever_they_stand(
    word: str, said: str, shown: str
) -> None:
    assert redacted_text(said, hidden_parts([word])) == shown
    open_words = ["push", "/mnt/a@b", "s3://bucket/run", "http://h:1/x", "--at=9:00"]
    assert hidden_parts(open_words) == set()


ADDRESSES = (
    f"http://user:{CANARY}@{HOST}",
    f"http://{CANARY}@{HOST}",
    f"http://{HOST}/?token={CANARY}",
    f"http://{HOST}#{CANARY}",
    f"http://user:{CANARY}/{CANARY}@{HOST}",
    f"http://user:{CANARY}@{HOST}:{CANARY}",
    f"dns://user:{CANARY}@nowhere.invalid:80",
    f"dns://nowhere.invalid:{CANARY}",
    f"user:{CANARY}@{HOST}",
    f"sftp://user:{CANARY}@{HOST}/x",
    f"s3://user:{CANARY}@bucket/x",
    f"hf://user:{CANARY}@bucket/x?token={CANARY}",
)


def check_silent(*words: object, debug: bool = True) -> None:
    """Run a command in each of its forms; nothing of what it says has the secret."""
    for flag in ("", "--json", "--debug"):
        if flag == "--debug" and not debug:  # shows the names of files
            continue
        if flag == "--json" and words[0] not in ("fleet", "doctor", "log"):
            continue
        try:
            done = invoke(*words, *filter(None, [flag]))
            said = done.stdout + done.stderr
        except Exception as exc:  # noqa: BLE001 - what --debug shows
            said = "".join(traceback.format_exception(exc))
        assert CANARY not in said, (words, flag)


@pytest.mark.full
@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_of_replicas_are_shown_without_secrets(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_silent("fleet", "status", address, "--timeout", "0.5")
    listed = tmp_path / "replicas.txt"
    listed.write_text(f"{address}\n")
    check_silent("fleet", "status", "--inventory", listed, "--timeout", "0.5")
    monkeypatch.setenv("DELTACHAIN_ENGINES", address)
    check_silent("fleet", "status", "--timeout", "0.5")
    check_silent("doctor")


@pytest.mark.parametrize("name", sorted(VARIABLES))
@pytest.mark.parametrize("form", ["{}", "http://user:{}@127.0.0.1:9", "-----BEGIN KEY-----\n{}"])
def test_no_variable_is_shown_that_may_be_a_secret(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("URL", "DRAFT_URL", "PRESENCE_URL") and "://" not in form:
        return  # the name of a folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"DELTACHAIN_{name}", form.format(CANARY))
    check_silent("doctor")
    check_silent("log", tmp_path / "chain", debug=False)
    check_silent("fleet", "status", f"http://{HOST}", "--timeout", "0.5", debug=False)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"])
@pytest.mark.parametrize("form", ["{}", "ftp://u:{}@h", "http://u:{}@h:{}", "http://u:{}@[h"])
def test_no_proxy_is_shown(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, form.replace("{}", CANARY))
    check_silent("doctor")
    check_silent("fleet", "status", "http://replica.invalid:1", "--timeout", "0.5")


@pytest.mark.parametrize(
    "name",
    ["TOKEN_FILE", "ENGINE_KEY_FILE", "SIGNING_KEY", "TRUSTED_KEYS", "ENGINES", "CLIENT_CERT"],
)
@pytest.mark.parametrize(
    "form", ["{}", "a\n{}\n", "# c\n{} x\n", "-----BEGIN\n{}", "\xff{}", "{}\x07"]
)
def test_no_line_of_a_wrong_file_is_shown(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(form.format(CANARY).encode("latin-1"))
    monkeypatch.setenv(f"DELTACHAIN_{name}", os.fspath(file))
    check_silent("doctor")
    check_silent("log", tmp_path / "chain")
    check_silent("fleet", "status", f"http://{HOST}", "--timeout", "0.5")


PLACE = re.compile("URL|DIR|FILE|FOLDER|PORT|SRC|DST|ENGINE|CHECKPOINT|OLD|NEW|BASE|DELTA")
COMMANDS: dict[str, Any] = vars(COMMAND)["commands"]
TAKEN = [
    (command, parameter.name)
    for command, of in COMMANDS.items()
    for parameter in of.params
    if PLACE.search(parameter.metavar or "")
]
"""Commands and those of their parameters that are a path, a URL or an address."""


def words_of(command: str, taken: str, value: str, folder: Path) -> list[str]:
    """A command line with a value, and whatever else it needs."""
    words, others = [command], {"verb": "status", "subject": "store"}
    for parameter in COMMANDS[command].params:
        name = parameter.name
        if name == taken or parameter.required or name in ("destination", "url"):
            given = value if name == taken else others.get(name, str(folder / name))
            words += (
                [given] if parameter.param_type_name == "argument" else [parameter.opts[0], given]
            )
    return words


@pytest.mark.parametrize(("command", "taken"), TAKEN)
@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{CANARY}@h:99999/x?token={CANARY}",
        f"s3://user:{CANARY}@h:port/x",
        f"s3:///x?token={CANARY}",
        f"https://user:{CANARY}@?token={CANARY}",
        f"hf://user:{CANARY}/{CANARY}@buckets/a/b",
    ],
)
def test_no_argument_of_a_command_is_shown_with_a_secret(
    command: str, taken: str, url: str, tmp_path: Path
) -> None:
    words = words_of(command, taken, url, tmp_path)
    for flags in ([], ["--debug"]):
        done = invoke(*words, *flags)
        assert done.code != 0, words
        assert CANARY not in done.stdout + done.stderr, words


@pytest.mark.parametrize("debug", [True, False])
def test_the_text_of_a_library_is_shown_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, debug: bool
) -> None:
    def broken(*_: object, **__: object) -> None:
        try:
            int(CANARY)
        except ValueError as exc:
            raise RuntimeError(f"cannot open 's3://user:{CANARY}@h/x'") from exc

    monkeypatch.setattr("deltachain.store.open_store", broken)
    monkeypatch.setenv("HTTP_PROXY", f"http://user:{CANARY}@proxy:1")
    done = invoke("log", tmp_path, *["--debug"][:debug])
    assert done.code == 1
    assert "RuntimeError: cannot open 's3://h/x'" in done.stderr
    assert CANARY not in done.stdout + done.stderr


def test_a_mistake_in_the_command_line_is_shown_without_secrets(tmp_path: Path) -> None:
    for words in (
        ["log", tmp_path, f"s3://user:{CANARY}@h/x"],
        [f"s3://user:{CANARY}@h/x"],
        ["log", tmp_path, "--since", f"http://h?token={CANARY}"],
        ["inspect", tmp_path, "--version", f"user:{CANARY}@h"],
        ["pull", tmp_path, "--out", f"s3://user:{CANARY}@bucket/x"],
    ):
        done = invoke(*words)
        assert done.code == 2, words
        assert CANARY not in done.stdout + done.stderr, words
    assert "out=s3:/bucket/x: expected a path, found a URL" in done.stderr

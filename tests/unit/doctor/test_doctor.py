"""A chain to examine, in an environment of its own."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from deltachain.chain.trust import SigningKey
from deltachain.doctor import Finding, Grade, Role
from deltachain.doctor.examine import SKEW_S, check_engines, clocks, examine, probe_writes
from deltachain.errors import StorePermissionError
from deltachain.store import open_store
from deltachain.store.base import ObjectInfo
from deltachain.store.file import FileStore
from deltachain.types import Buffer
from deltachain_sglang.table import TABLE as SGLANG
from deltachain_vllm.table import TABLE as VLLM
from tests.support.made_up import write_engine, write_package
from tests.support.seaweed import Seaweed
from tests.unit.cli.support import ok as run
from tests.unit.cli.support import random_state, write_checkpoint


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing of this machine's, and everything put back."""
    foreign = ("DELTACHAIN_", "AWS_", "HF_", "SSL_", "VLLM_", "SGLANG_", "HTTP", "ALL_PROXY")
    for name in list(os.environ):
        if name.upper().startswith(foreign):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # and no ~/.aws
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chain")
    run("push", write_checkpoint(root / "weights", random_state()), root / "chain", "--step", 400)
    return root / "chain"


@pytest.mark.parametrize("ahead_s", [-7200.0, -SKEW_S - 1, SKEW_S + 1, 7200.0])
def test_a_clock_that_is_off_is_a_fault(ahead_s: float) -> None:
    found = clocks(ahead_s=ahead_s)
    assert found.grade is Grade.FAULT
    assert ("behind" in found.said) is (ahead_s > 0)
    assert clocks(ahead_s=0.0).grade is Grade.OK


def test_a_follower_finds_its_clock_behind_without_a_write(chain: Path, tmp_path: Path) -> None:
    shutil.copytree(chain, tmp_path / "copy")
    future = time.time() + 7200
    for file in (tmp_path / "copy" / "manifests").iterdir():
        os.utime(file, (future, future))
    (found,) = faults(tmp_path / "copy")
    assert (found.check, "behind the store's" in found.said) == ("clock", True)


@pytest.mark.parametrize(("ahead_s", "named"), [(-7200, "ahead of the store's"), (7200, "behind")])
def test_a_follower_hears_the_clock_of_its_store(
    chain: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float, named: str
) -> None:
    monkeypatch.setattr(FileStore, "clock", lambda _: time.time() + ahead_s)
    (found,) = faults(chain)
    assert (found.check, named in found.said) == ("clock", True)


def test_a_publisher_whose_clock_is_ahead_is_named(chain: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(chain, copy)
    newest = max((copy / "manifests").iterdir())
    os.utime(newest, (0, time.time() - 2 * SKEW_S - 60))
    (found,) = [one for one in examined(copy) if one.check == "clock"]
    assert found.grade is Grade.NOTE
    assert "3 minutes after its write" in found.said
    assert "the clock of its publisher is ahead" in found.said
    os.utime(newest)  # as of a copy that is younger than its version
    assert not [one for one in examined(copy) if one.check == "clock"]


FOLLOWER, PUBLISHER = Role.FOLLOWER, Role.PUBLISHER


def examined(url: object, role: Role = FOLLOWER) -> list[Finding]:
    return list(examine(str(url), role))


def faults(url: object, role: Role = FOLLOWER) -> list[Finding]:
    return [found for found in examined(url, role) if found.grade is Grade.FAULT]


def set_all(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_healthy_follower_has_no_fault_and_writes_nothing(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a follower wrote")

    for name in ("put", "put_if_absent", "delete"):
        monkeypatch.setattr(FileStore, name, never)
    assert faults(chain) == []
    said = " ".join(found.said for found in examined(chain))
    assert "version 0 of step 400 is the newest" in said
    assert "a follower that holds nothing fetches" in said


def test_a_healthy_publisher_leaves_nothing_behind(chain: Path) -> None:
    before = sorted(path for path in chain.rglob("*") if path.is_file())
    assert faults(chain, PUBLISHER) == []
    assert sorted(path for path in chain.rglob("*") if path.is_file()) == before
    checks = {found.check for found in examined(chain, PUBLISHER) if found.grade is Grade.OK}
    assert {"writes", "clock", "store", "chain", "start"} <= checks


Plant = Callable[[Mapping[str, Path]], Mapping[str, str]]


def absent(name: str) -> Plant:
    return lambda paths: {name: str(paths["root"] / "absent")}


def written(name: str, content: str) -> Plant:
    def plant(paths: Mapping[str, Path]) -> Mapping[str, str]:
        file = paths["root"] / "planted"
        file.write_text(content)
        return {name: str(file)}

    return plant


def given(**values: str) -> Plant:
    return lambda _: values


LISTED = {"VLLM_PLUGINS": "deltachain,deltachain_http"}
BOTH = {"DELTACHAIN_TOKEN": "a", "DELTACHAIN_TOKEN_FILE": __file__}

ENVIRONMENTS: list[tuple[str, Plant, str]] = [
    ("a misspelt name", given(DELTACHAIN_FOLOW="1"), "DELTACHAIN_FOLOW is not a known"),
    ("a value", given(DELTACHAIN_POLL_S="often"), "DELTACHAIN_POLL_S is 'often'"),
    ("two tokens", given(**BOTH), "are both set"),
    ("an absent file of tokens", absent("DELTACHAIN_TOKEN_FILE"), "absent: No such file"),
    ("an empty file of keys", written("DELTACHAIN_ENGINE_KEY_FILE", "\n"), "has no token"),
    ("no signing key", written("DELTACHAIN_SIGNING_KEY", "-"), "expected an unencrypted"),
    ("no trusted key", given(DELTACHAIN_TRUSTED_KEYS="ed25519:1"), "ed25519"),
    ("an age without keys", given(DELTACHAIN_MAX_HEARTBEAT_AGE_S="9"), "without DELTACHAIN_TRUST"),
    ("no base", absent("DELTACHAIN_BASE"), "DELTACHAIN_BASE is"),
    ("no CA", absent("SSL_CERT_FILE"), "SSL_CERT_FILE is"),
    ("no folder of CAs", absent("SSL_CERT_DIR"), "SSL_CERT_DIR is"),
    ("an absent inventory", absent("DELTACHAIN_ENGINES"), "DELTACHAIN_ENGINES"),
    ("a list of engines", given(DELTACHAIN_ENGINES="http://a, b"), "entry 2 is no address"),
    ("a CA that is none", written("SSL_CERT_FILE", "-"), "has no certificates"),
    ("a key alone", absent("DELTACHAIN_CLIENT_KEY"), "without DELTACHAIN_CLIENT_CERT"),
    ("a proxy", given(HTTPS_PROXY="gopher://proxy"), "proxy of the environment is invalid"),
    ("a spool", given(DELTACHAIN_SPOOL="/proc/spool"), "/proc, where objects are kept"),
]


@pytest.mark.parametrize(
    ("plant", "named"), [row[1:] for row in ENVIRONMENTS], ids=[row[0] for row in ENVIRONMENTS]
)
def test_a_mistake_of_the_environment_is_named_once_with_a_hint(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant, named: str
) -> None:
    set_all(monkeypatch, plant({"root": tmp_path}))
    (found,) = faults(chain)
    assert named in found.said
    assert found.hint


def test_several_mistakes_are_all_named(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "DELTACHAIN_FOLOW": "1",
        "DELTACHAIN_POLL_S": "often",
        "DELTACHAIN_MAX_LAG": "-1",
        "DELTACHAIN_BASE": "/absent",
    }
    set_all(monkeypatch, wrong)
    said = [found.said for found in faults(chain)]
    assert len(said) == len(wrong)
    assert all(any(name in one for one in said) for name in wrong)


@pytest.mark.parametrize("secret", ["TOKEN", "ENGINE_KEY"])
def test_no_secret_is_shown(chain: Path, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv(f"DELTACHAIN_{secret}", "hunter2")
    assert "hunter2" not in str(examined(chain))
    assert f"DELTACHAIN_{secret}=(set)" in str(examined(chain))


@pytest.mark.parametrize(
    ("name", "version", "environment", "named"),
    [
        ("vllm", "0.32.0", {}, "vLLM loads no routes of deltachain"),
        ("vllm", "0.32.0", {**LISTED, "DELTACHAIN_PAUSE": "retract"}, "none of keep, wait, abort"),
        ("sglang", "0.5.23", {"DELTACHAIN_PAUSE": "keep"}, "none of retract, in_place, abort"),
        ("sglang", "0.5.23", {"SGLANG_PLUGINS": "other"}, "SGLang does not load deltachain"),
        ("blake3", "0.1", {}, "blake3 0.1 is older than 1.0"),
    ],
)
def test_a_wrong_package_is_named(  # noqa: PLR0917
    chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    version: str,
    environment: Mapping[str, str],
    named: str,
) -> None:
    write_package(tmp_path / "site", name, version=version)
    if name in TABLES:
        write_engine(tmp_path / "site", TABLES[name])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    set_all(monkeypatch, {"DELTACHAIN_URL": str(chain), **environment})
    (found,) = faults("")
    assert named in found.said
    assert found.hint


def test_an_old_package_that_an_engine_pins_is_no_fault_of_a_follower(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path / "site", "compressed_tensors", version="0.17.0")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert faults(chain) == []
    said = [found.said for found in faults(chain, PUBLISHER)]
    assert "compressed-tensors 0.17.0 is older than 0.18" in said


TABLES = {"vllm": VLLM, "sglang": SGLANG}


@pytest.mark.parametrize("engine", TABLES)
def test_names_of_an_engine_are_shown_and_a_missing_one_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    table, site = TABLES[engine], tmp_path / "site"
    write_package(site, engine, version="9.9")
    monkeypatch.syspath_prepend(str(site))
    for row in table.rows:
        write_engine(site, table, row.names[-1:])
        shown = {found.said: found.grade for found in check_engines({})}
        (said,) = [one for one in shown if row.names[-1] in one]
        assert shown[said] is (Grade.NOTE if row.without else Grade.FAULT)
        assert {said for said in shown if "9.9 was not run with this deltachain" in said}
        has = [one for one in shown if "names by which deltachain" in one]
        assert len(has) == len(table.rows) - 1
    write_engine(site, table)
    assert [found.grade for found in check_engines({})].count(Grade.OK) == 1 + len(table.rows)


def test_a_publisher_without_torch_is_told(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr("deltachain.doctor.examine.version", installed)
    (found,) = faults(chain, PUBLISHER)
    assert "needs the extra torch" in found.said
    assert faults(chain) == []


def test_a_chain_that_no_trusted_key_signed(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACHAIN_TRUSTED_KEYS", str(SigningKey.generate().public))
    (found,) = faults(chain)
    assert (found.check, "signature" in found.said) == ("chain", True)


def test_no_chain_is_a_note_for_followers_and_fine_for_publishers(tmp_path: Path) -> None:
    assert faults(tmp_path / "new") == faults(tmp_path / "new", PUBLISHER) == []
    (found,) = [one for one in examined(tmp_path / "new") if one.check == "chain"]
    assert found.grade is Grade.NOTE
    assert "has no chain: a follower waits" in found.said


def test_a_damaged_chain_is_named(chain: Path, tmp_path: Path) -> None:
    (tmp_path / "chain.json").write_bytes((chain / "chain.json").read_bytes()[:-9])
    (found,) = faults(tmp_path)
    assert found.check == "chain"


S3 = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}


@pytest.mark.parametrize(
    ("url", "endpoint", "said", "hint"),
    [
        ("s4://bucket/run", "", "s4", ""),
        ("s3://b/run", "", "bucket", ""),
        ("hf://me/run", "", "hf://", ""),
        ("s3://bucket/run", "127.0.0.1:9", "endpoint", "AWS_ENDPOINT_URL"),
        ("s3://bucket/run", "http://127.0.0.1:9", "http://127.0.0.1:9", ""),
    ],
)
def test_a_url_that_names_no_store_that_answers(
    monkeypatch: pytest.MonkeyPatch, url: str, endpoint: str, said: str, hint: str
) -> None:
    monkeypatch.setattr("deltachain.doctor.examine.DEADLINE_S", 0.5)
    if endpoint:
        set_all(monkeypatch, S3 | {"AWS_ENDPOINT_URL": endpoint})
    (found,) = faults(url)
    assert said in found.said
    assert hint in found.hint


class Lying(FileStore):
    """A store that breaks a promise."""

    lie = ""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if self.lie == "read only":
            raise StorePermissionError(f"{self.url}: 403 AccessDenied", key=key, url=self.url)
        if self.lie == "overwrites" or (self.lie == "races" and "raced" in key):
            self.put(key, data)
        else:
            super().put_if_absent(key, data)

    def find(self, key: str) -> ObjectInfo | None:
        found = super().find(key)
        if found is None or self.lie != "skewed" or found.modified is None:
            return found
        return replace(found, modified=found.modified + 7200)


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        ("read only", "nothing can be written"),
        ("overwrites", "it overwrites objects that are there"),
        ("races", "concurrent writers were told to have won"),
        ("skewed", "s behind the store's"),
    ],
)
def test_a_store_that_breaks_a_promise_is_named(tmp_path: Path, lie: str, named: str) -> None:
    store = Lying(tmp_path / "store")
    store.lie = lie
    (found,) = [one for one in probe_writes(store) if one.grade is Grade.FAULT]
    assert named in found.said
    assert found.hint
    assert list(store.list("")) == []


@pytest.mark.full
def test_a_bundle_of_cas_for_s3_that_is_not_there_is_named(
    seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, {**seaweed.env(), "AWS_CA_BUNDLE": "/absent"})
    (found,) = faults(seaweed.url("doctor"))
    assert "/absent" in found.said
    assert "AWS_CA_BUNDLE" in found.hint


def test_a_silence_shorter_than_polls_is_named(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"URL": str(chain), "FOLLOW": "1", "POLL_S": "5"}.items():
        monkeypatch.setenv(f"DELTACHAIN_{name}", value)
    monkeypatch.setenv("DELTACHAIN_MAX_SILENCE_S", "60")
    assert faults("") == []
    monkeypatch.setenv("DELTACHAIN_MAX_SILENCE_S", "4")
    (found,) = faults("")
    assert "DELTACHAIN_MAX_SILENCE_S" in found.said
    assert found.hint


@pytest.mark.full
def test_credentials_of_s3_are_checked(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    (found,) = faults(seaweed.url("doctor"))
    assert "NoCredentialsError" in found.said
    assert "AWS_ACCESS_KEY_ID" in found.hint
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    (found,) = faults(seaweed.url("doctor"))
    assert "403" in found.said
    set_all(monkeypatch, seaweed.env())
    assert faults(seaweed.url("doctor"), PUBLISHER) == []
    store = open_store(seaweed.url("doctor"))
    assert list(store.list("")) == []
    store.close()
    (found,) = faults("s3://absent-bucket/run", PUBLISHER)
    assert "absent-bucket" in found.said


def test_the_chain_of_a_draft_is_examined_too(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACHAIN_DRAFT_URL", str(chain))
    assert ["answers in" in found.said for found in examined(chain)].count(True) == 2
    monkeypatch.setenv("DELTACHAIN_DRAFT_URL", "nowhere://run")
    (wrong,) = faults(chain)
    assert (wrong.check, "nowhere" in wrong.said) == ("store", True)


def test_a_place_for_presences_is_tried(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tmp_path / "replicas"
    monkeypatch.setenv("DELTACHAIN_PRESENCE_URL", str(board))
    (found,) = [found for found in examined(chain) if found.check == "presence"]
    assert (found.grade, "every 10 s" in found.said) == (Grade.OK, True)
    assert [path for path in board.rglob("*") if path.is_file()] == []


def test_a_presence_inside_the_chain_is_named(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACHAIN_PRESENCE_URL", f"{chain}/replicas")
    (found,) = faults(chain)
    assert (found.check, "is inside the chain" in found.said) == ("presence", True)
    monkeypatch.setenv("DELTACHAIN_URL", str(chain))
    assert {found.check for found in faults("")} == {"start", "presence"}


def test_a_place_for_presences_that_is_not_writable_is_named(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACHAIN_PRESENCE_URL", __file__)
    (found,) = faults(chain)
    assert found.check == "presence"
    assert found.hint

import json
import signal
import subprocess
from pathlib import Path

import pytest

from deltachain.errors import ConfigError, StoreUnavailableError
from deltachain.maintain import Maintained, Maintainer
from deltachain.mirror.mirror import check_placement
from deltachain.publish import Publisher
from deltachain.store import MemoryStore, open_store
from tests.support.models import TinyModel, train_
from tests.unit.cli.support import contents, invoke, ok, refused, running
from tests.unit.maintain.grown import Grown


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    folder, model = tmp_path / "chain", TinyModel()
    with Publisher(str(folder)).attach(model, assets={}) as publisher:
        for step in range(3):
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()
    return folder


def test_a_chain_is_mirrored_and_verified(chain: Path, tmp_path: Path) -> None:
    done = ok("mirror", chain, tmp_path / "copy")
    assert done.stdout == ""
    assert "version 3; " in done.stderr
    ok("verify", tmp_path / "copy")
    again = ok("mirror", chain, tmp_path / "copy")
    assert "version 3; 0 objects, 0 B" in again.stderr


@pytest.mark.parametrize("inside", ["sub", "a/b"])
def test_a_mirror_is_not_put_where_a_chain_is_stored(
    chain: Path, tmp_path: Path, inside: str
) -> None:
    other = tmp_path / "other"
    assert invoke("mirror", chain, other).code == 0
    before = {folder: sorted(folder.rglob("*")) for folder in (chain, other)}
    link = tmp_path / "link"
    link.symlink_to(chain)
    for outer in (chain, other, link):
        done = refused("mirror", chain, outer / inside, code=2, said="where a chain is stored")
        assert "beside the chain" in done.stderr
    assert {folder: sorted(folder.rglob("*")) for folder in before} == before


def test_a_mirror_is_not_put_below_the_prefix_of_its_source() -> None:
    source, below = (MemoryStore(f"bucket/chain{end}") for end in ("", "/copy"))
    with pytest.raises(ConfigError, match="is inside memory://bucket/chain") as caught:
        check_placement(source, below)
    assert "beside the chain" in caught.value.hint
    check_placement(source, MemoryStore("bucket/chain-copy"))


def test_json_has_one_object_a_version(chain: Path, tmp_path: Path) -> None:
    done = invoke("mirror", chain, tmp_path / "copy", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["version"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["lag_versions"] == 3
    assert all(row["objects"] > 0 and row["nbytes"] > 0 for row in rows)


def test_a_mirror_from_the_head(chain: Path, tmp_path: Path) -> None:
    assert invoke("mirror", chain, tmp_path / "copy", "--from", "head").code == 0
    record = json.loads(open_store(tmp_path / "copy").get("mirror.json"))
    assert record["writer"].startswith("deltachain ")
    assert invoke("mirror", chain, tmp_path / "other", "--from", "soon").code == 2


def test_a_mirror_is_promoted(chain: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    invoke("mirror", chain, copy)
    done = invoke("mirror", "--promote", copy, "--json")
    assert done.document == {"url": str(copy), "version": 3}
    refused("mirror", "--promote", copy, code=2, said="is no mirror")


def test_two_urls_are_needed(chain: Path) -> None:
    refused("mirror", chain, code=2, said="mirror needs two URLs")


VERSIONS = 70


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("grown")
    Grown(open_store(str(url))).grow(VERSIONS, density=0.01)
    return url


@pytest.fixture
def url(original: Path, tmp_path: Path) -> Path:
    """A copy of that chain, with an anchor of version 40."""
    subprocess.run(["cp", "-r", str(original), str(tmp_path / "chain")], check=True)  # noqa: S607
    ok("anchor", tmp_path / "chain", "--version", 40, "--json")
    return tmp_path / "chain"


def prune(url: Path, *, keep_last: int) -> None:
    for _ in range(2):  # what the first round retires is deleted by the second
        ok("maintain", url, "--once", "--keep-last", keep_last, "--grace", "0s")


def newcomers_cannot_join(url: Path) -> None:
    for part in url.glob("anchors/*/*"):
        part.unlink()


def test_a_round_tells_what_it_added_and_retired(url: Path) -> None:
    report = ok("maintain", url, "--once", "--keep-last", 20, "--json").document
    assert report["head"] == VERSIONS - 1
    assert not report["failed"]
    spans = {skip["version"] - skip["base"] for skip in report["skips"]}
    assert 8 in spans
    assert report["pruned"]["retired"] > 0
    assert report["pruned"]["deleted"]["objects"] == 0
    assert report["pruned"]["waiting"]["nbytes"] > 0
    again = ok("maintain", url, "--once", "--keep-last", 20)
    assert again.stdout == ""
    assert f"nothing to do up to version {VERSIONS - 1}" in again.stderr


def test_a_round_without_pruning_deletes_and_retires_nothing(url: Path) -> None:
    report = ok("maintain", url, "--once", "--no-prune", "--json").document
    assert report["pruned"] is None
    assert not (url / "prunes").exists()


@pytest.mark.full
def test_a_dry_run_says_what_the_run_then_frees(url: Path) -> None:
    ok("maintain", url, "--once", "--keep-last", 20, "--grace", "0s")
    before = contents(url)
    expected = ok("prune", url, "--keep-last", 20, "--grace", "0s", "--dry-run", "--json").document
    assert contents(url) == before
    done = ok("prune", url, "--keep-last", 20, "--grace", "0s", "--json").document
    freed = [len(data) for key, data in before.items() if key not in contents(url)]
    assert done["deleted"] == expected["deleted"]
    assert sum(freed) == expected["deleted"]["nbytes"] > 0
    assert ok("verify", url, "--from", VERSIONS - 20, "--json").document["not_rebuilt"] == []
    assert "were pruned" in ok("verify", url).stdout


@pytest.mark.parametrize("command", ["pull", "inspect", "revert", "mirror"])
def test_what_was_pruned_is_called_pruned(url: Path, tmp_path: Path, command: str) -> None:
    """Nothing brings it back, so the hint must not ask for a publisher or a copy."""
    prune(url, keep_last=20)
    version = ok("verify", url, "--json").document["not_rebuilt"][0]
    options: dict[str, tuple[object, ...]] = {
        "pull": ("--version", version, "--out", tmp_path / "out"),
        "inspect": ("--version", version),
        "revert": ("--to", version),
        "mirror": (tmp_path / "mirror", "--from", version),
    }
    done = refused(
        command, url, *options[command], code=4, said=("pruned", "choose a version that was kept")
    )
    assert "lifecycle" not in done.stderr


def test_tables_fit_eighty_columns(url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in (("stats", url), ("prune", url, "--dry-run"), ("maintain", url, "--once")):
        shown = ok(*command).stdout
        assert shown
        assert max(map(len, shown.splitlines())) <= 80, shown


def test_stats_add_up(url: Path) -> None:
    report = ok("stats", url, "--json").document
    assert sum(kind["nbytes"] for kind in report["kinds"]) == report["nbytes"]
    assert report["nbytes"] == sum(map(len, contents(url).values()))
    assert [reader["age"] for reader in report["readers"]] == [None, 1, 10]
    assert report["readers"][1]["edges"] == 1


def test_stats_show_a_chain_that_newcomers_cannot_join(url: Path) -> None:
    newcomers_cannot_join(url)
    shown = ok("stats", url).stdout
    assert "no way: restart the publisher" in shown
    assert "newcomers have no way to the head" in shown
    report = ok("stats", url, "--json").document
    assert (report["prune"], report["readers"][0]["edges"]) == (None, None)


@pytest.mark.parametrize("options", [(), ("--json",), ("--no-prune",)])
def test_a_single_round_fails_where_newcomers_cannot_join(
    url: Path, options: tuple[str, ...]
) -> None:
    newcomers_cannot_join(url)
    done = refused("maintain", url, "--once", *options, code=4, said="newcomers")
    assert done.stderr.count("restart the publisher") == 1
    if "--json" in options:
        assert done.document["failed"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("prune {url} --keep-within 7fortnights", "is not a span of time"),
        ("maintain {url} --once --every soon", "is not a span of time"),
        ("anchor {url} --version 1000", "is not committed"),
    ],
)
def test_what_cannot_be_done_is_refused(url: Path, words: str, message: str) -> None:
    done = invoke(*words.format(url=url).split())
    assert done.code != 0
    assert message in done.stderr
    assert "hint" in done.stderr
    assert done.stdout == ""


def test_a_url_without_versions_is_named(tmp_path: Path) -> None:
    Grown(open_store(str(tmp_path)))
    for command in ("stats", "prune", "anchor"):
        refused(command, tmp_path, code=4, said="has no version yet")


@pytest.mark.parametrize(
    "command",
    [("maintain", "--once"), ("prune",), ("anchor",), ("tag", "good"), ("revert", "--to", "3")],
)
def test_a_mirror_is_left_to_its_source(
    url: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    ok("mirror", url, tmp_path / "mirror")
    before = contents(tmp_path / "mirror")
    name, *options = command
    refused(name, tmp_path / "mirror", *options, code=2, said=("is a mirror of", str(url)))
    assert contents(tmp_path / "mirror") == before


def test_a_service_outlives_a_store_that_does_not_answer(
    url: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    original = Maintainer.round

    def fail_twice(self: Maintainer) -> Maintained | None:
        rounds.append(len(rounds))
        if len(rounds) <= 2:
            raise StoreUnavailableError("no answer")
        if len(rounds) > 3:
            raise ConfigError("ends the test")
        return original(self)

    monkeypatch.setattr(Maintainer, "round", fail_twice)
    done = refused("maintain", url, "--every", "0.01s", code=2)
    assert done.stderr.count("no answer") == 2
    assert "skips added" in done.stdout


@pytest.mark.full
def test_a_service_waits_for_a_chain_that_nobody_has_made_yet(url: Path, tmp_path: Path) -> None:
    early = tmp_path / "early"
    early.mkdir()
    assert invoke("maintain", early, "--once").code == 3
    with running("maintain", early, "--every", "0.1s") as service:
        assert "error" in service.error_line()  # it looked, and goes on
        for path in sorted(url.rglob("*"), key=lambda path: "chain.json" in path.name):
            if path.is_file():
                target = early / path.relative_to(url)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
        assert "skips added" in service.line()
        assert service.end(signal.SIGINT).code == 130


@pytest.mark.full
@pytest.mark.parametrize("width", ["80", "120"])
def test_log_marks_what_is_pruned_and_tagged(
    url: Path, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("tag", url, "good", "--version", VERSIONS - 3)
    prune(url, keep_last=5)
    rows = ok("log", url, "-n", VERSIONS, "--json").document["versions"]
    pruned = {row["version"] for row in rows if row["pruned"]}
    gone = {row["version"] for row in rows if not list(url.glob(f"deltas/{row['version']:020d}-*"))}
    assert pruned
    assert pruned == {v for v in gone if rows[-1 - v]["kind"] == "delta"}
    assert [row["version"] for row in rows if row["tags"] == ["good"]] == [VERSIONS - 3]
    monkeypatch.setenv("COLUMNS", width)
    shown = ok("log", url, "-n", VERSIONS).stdout
    assert "tag good" in shown
    assert shown.count("delta pruned") == len(pruned)
    assert max(map(len, shown.splitlines())) <= int(width)


def test_log_goes_on_where_a_tag_is_damaged(url: Path) -> None:
    ok("tag", url, "good", "--version", 1)
    (url / "tags/good/00000000.json").write_bytes(b"{}")
    done = ok("log", url, "-n", 2)
    assert "are not marked" in done.stderr

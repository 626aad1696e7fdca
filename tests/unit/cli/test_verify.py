import json
import os
import random
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from deltachain.chain.chain import Chain
from deltachain.chain.trust import SigningKey
from deltachain.codec import Change, encode_part
from deltachain.delta import ABSOLUTE, TensorDelta, changes
from deltachain.errors import ChainError, DigestMismatchError, ForkedChainError
from deltachain.format import keys
from deltachain.format.documents import Edge, Manifest, ObjectRef, dump, parse, seal, unseal
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.store import open_store
from deltachain.types import StateDigest, TensorSpec
from deltachain.verify import verify
from tests.support.values import present
from tests.unit.cli.support import (
    SPECS,
    Pushed,
    State,
    contents,
    invoke,
    ok,
    random_state,
    refused,
    train,
    write_checkpoint,
)


class Keys:
    """A new signing key in a file, and what the environment says of keys."""

    def __init__(self, file: Path, environment: pytest.MonkeyPatch) -> None:
        ok("keygen", file)
        self.file, self.environment = file, environment
        self.public = SigningKey.load(file).public

    def sign(self) -> None:
        self.environment.setenv("DELTACHAIN_SIGNING_KEY", str(self.file))

    def sign_not(self) -> None:
        self.environment.delenv("DELTACHAIN_SIGNING_KEY")

    def trust(self) -> None:
        self.environment.setenv("DELTACHAIN_TRUSTED_KEYS", str(self.public))


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    return Keys(tmp_path / "key", monkeypatch)


def test_keygen_writes_a_file_for_its_owner_and_prints_the_public_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    before = os.umask(0)
    try:
        done = ok("keygen", file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert done.stdout == f"{SigningKey.load(file).public}\n"
    report = ok("keygen", tmp_path / "other", "--json").document
    other = SigningKey.load(tmp_path / "other").public
    assert report == {
        "file": str(tmp_path / "other"),
        "public_key": str(other),
        "key_id": other.key_id,
    }


def test_keygen_overwrites_nothing_and_makes_no_folder(key: Keys, tmp_path: Path) -> None:
    before = key.file.read_bytes()
    refused("keygen", key.file, code=2, said="never overwritten")
    assert key.file.read_bytes() == before
    done = refused("keygen", tmp_path / "none" / "key", code=2, said="No such file or directory")
    assert "hint name a file in a folder that exists" in done.told


def test_a_chain_is_signed_from_its_first_push(key: Keys, tmp_path: Path) -> None:
    key.sign()
    state, url, by = random_state(), tmp_path / "chain", key.public.key_id
    for number in range(2):
        ok("push", write_checkpoint(tmp_path / f"step-{number}", state), url)
        state = train(state, number)
    assert "not checked" in ok("log", url).stdout
    assert "not checked" in ok("inspect", url).stdout
    assert "not checked" in ok("verify", url).stdout
    key.trust()
    for command in ("log", "inspect", "verify"):
        shown = ok(command, url).stdout
        assert by in shown
        assert "not checked" not in shown
    log = ok("log", url, "--json").document
    assert [version["signed_by"] for version in log["versions"]] == [[by]] * 2
    assert ok("inspect", url, "--json").document["signed_by"] == [by]
    report = ok("verify", url, "--json").document
    assert (report["signed"], report["checked"]) == ({by: [0, 1]}, True)
    ok("pull", url, "--out", tmp_path / "out")
    assert ok("sign", url, "--json").document["committed"] is False


def test_a_chain_is_signed_from_the_middle_on(key: Keys, pushed: Pushed, tmp_path: Path) -> None:
    assert "DELTACHAIN_SIGNING_KEY is not set" in invoke("sign", pushed.url).stderr
    key.trust()
    refused("pull", pushed.url, "--out", tmp_path / "out", code=5, said="deltachain sign")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.safetensors"))
    key.sign()
    assert invoke("push", pushed.url.parent / "none", pushed.url).code != 0
    assert ok("sign", pushed.url, "--json").document == {
        "url": str(pushed.url),
        "committed": True,
        "version": 4,
        "signatures": [key.public.key_id],
        "signed_by": [key.public.key_id],
        "signed_again": [],
    }
    assert "nothing to do" in ok("sign", pushed.url).stdout
    ok("verify", pushed.url)
    ok("log", pushed.url)
    ok("inspect", pushed.url, "--version", 1)
    for version in (None, 0, 2):
        given = () if version is None else ("--version", version)
        ok("pull", pushed.url, "--out", tmp_path / f"v{version}", *given)
    ok("push", write_checkpoint(tmp_path / "next", train(pushed.states[-1], 9)), pushed.url)
    ok("verify", pushed.url)


@pytest.mark.full
def test_verify_names_a_record_that_nobody_signed(key: Keys, tmp_path: Path) -> None:
    key.sign()
    url, state, store = tmp_path / "chain", random_state(), open_store(str(tmp_path / "chain"))
    records: list[str] = []
    while not records:  # until so much has changed that an anchor is recorded
        ok("push", write_checkpoint(tmp_path / "step", state), url)
        state = train(state, 1, share=0.3)
        records = [info.key for info in store.list("edges/")]
    record = records[0]
    envelope = json.loads(store.get(record))
    payload = json.dumps(envelope["payload"], separators=(",", ":"), ensure_ascii=False)
    data = f'{{"blake3":"{envelope["blake3"]}","payload":{payload},"signatures":[]}}'
    (url / record).write_bytes(data.encode())
    ok("verify", url, "--to", "0")
    key.trust()
    refused("verify", url, code=5, said=f"{record}: no trusted key signed it")


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_a_log_of_reverts_and_signatures_is_legible(
    key: Keys, pushed: Pushed, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    key.sign()
    ok("sign", pushed.url)
    ok("revert", pushed.url, "--to", 1)
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = ok("log", pushed.url).stdout
    table = shown[shown.index("version  ") :]
    assert "\N{HORIZONTAL ELLIPSIS}" not in table
    assert "revert to 1" in table
    assert key.public.key_id[:8] in table
    assert max(map(len, table.splitlines())) <= columns
    assert ("committed" in table) is (columns == 140)


@pytest.mark.parametrize(
    "command",
    [
        ("maintain", "--once"),
        ("prune",),
        ("anchor",),
        ("tag", "good"),
        ("tag", "old", "--delete"),
        ("revert", "--to", "0"),
    ],
)
def test_writers_without_a_key_leave_a_signed_chain_as_it_is(
    key: Keys, pushed: Pushed, command: tuple[str, ...]
) -> None:
    """A record without a signature would take the place of one that readers accept, for good."""
    key.sign()
    ok("sign", pushed.url)
    ok("tag", pushed.url, "old")
    key.sign_not()
    before = contents(pushed.url)
    name, *options = command
    done = refused(name, pushed.url, *options, code=2, said="has no signing key")
    assert "set DELTACHAIN_SIGNING_KEY" in done.stderr
    assert contents(pushed.url) == before
    ok("prune", pushed.url, "--dry-run")
    key.sign()
    ok(name, pushed.url, *options)


def test_tags_and_prune_records_outlive_the_key_that_signed_them(
    key: Keys, pushed: Pushed, tmp_path: Path
) -> None:
    ok("tag", pushed.url, "first", "--version", "1")  # before the chain is signed
    ok("prune", pushed.url, "--keep-last", "1", "--grace", "0s")
    key.sign()
    begun = ok("sign", pushed.url, "--json").document
    assert "tags/first/00000001.json" in begun["signed_again"]
    key.trust()
    ok("tag", pushed.url, "gone", "--version", "2")
    ok("tag", pushed.url, "gone", "--delete")

    new = Keys(tmp_path / "new", key.environment)
    new.sign()
    ok("push", write_checkpoint(tmp_path / "next", train(pushed.states[-1], 9)), pushed.url)
    again = ok("sign", pushed.url, "--json").document
    assert not again["committed"]
    assert {"tags/first/00000002.json", "tags/gone/00000002.json"} <= set(again["signed_again"])
    new.trust()
    assert "nothing to do" in ok("sign", pushed.url).stdout
    listed = ok("tag", pushed.url, "--json").document["tags"]
    assert [(one["name"], one["version"]) for one in listed] == [("first", 1)]
    ok("prune", pushed.url, "--keep-last", "1")
    ok("maintain", pushed.url, "--once")
    ok("pull", pushed.url, "--tag", "first", "--out", tmp_path / "out")


def flip(file: Path, position: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 4
    file.write_bytes(data)


def payload(url: Path, version: int) -> Path:
    (found,) = (url / "deltas").glob(f"{version:020d}-*/*")
    return found


def rewrite(url: Path, version: int, edit: Callable[[str], str]) -> None:
    """Tamper with a manifest as somebody would who knows the format, and seals it again."""
    key = keys.manifest_key(version)
    before = dump(unseal((url / key).read_bytes(), Manifest, key=key)).decode()
    after = edit(before)
    assert before != after
    (url / key).write_bytes(seal(parse(after.encode(), Manifest, key=key)))


def test_a_whole_chain_is_proven(pushed: Pushed) -> None:
    report = ok("verify", pushed.url, "--json").document
    assert (report["first"], report["last"]) == (0, 3)
    anchors = report["edges"]["anchor"]
    assert anchors["proven"] == anchors["edges"] == 2  # one of version 0, one added behind another
    assert (report["edges"]["delta"]["proven"], report["refetched"]) == (3, [])
    assert [v["version"] for v in report["versions"]] == [0, 1, 2, 3]
    head = present(Chain.open(open_store(pushed.url)).head())
    assert report["state"] == str(head.state)
    assert "proven" in ok("verify", pushed.url).stdout


def test_a_part_of_a_chain_is_proven_from_nothing(pushed: Pushed) -> None:
    report = ok("verify", pushed.url, "--from", 1, "--to", 2, "--json").document
    assert [v["version"] for v in report["versions"]] == [1, 2]
    assert report["edges"]["delta"] | {"nbytes": 0, "frames": 0, "nnz": 0} == {
        "edges": 2, "proven": 2, "objects": 2, "nbytes": 0, "frames": 0, "nnz": 0,
    }  # fmt: skip
    refused("verify", pushed.url, "--to", 9, code=4)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_corrupt_object_is_named(pushed: Pushed, version: int) -> None:
    file = payload(pushed.url, version)
    key = str(file.relative_to(pushed.url))
    for position in random.Random(version).sample(range(file.stat().st_size), 20):
        flip(file, position)
        done = refused("verify", pushed.url, code=5, said=(key, "expected"))
        assert done.stdout == ""
        flip(file, position)
    ok("verify", pushed.url)


def anchor_of(url: Path, version: int) -> Path:
    (found,) = (url / "anchors").glob(f"{version:020d}-*/*")
    return found


def test_an_object_that_is_gone_is_named(pushed: Pushed) -> None:
    """Where nothing leads around it: version 3 has an anchor."""
    anchor_of(pushed.url, 3).unlink()
    file = payload(pushed.url, 2)
    file.unlink()
    done = refused(
        "verify", pushed.url, code=3, said=(str(file.relative_to(pushed.url)), "restore it")
    )
    assert done.stdout == ""


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("gone", [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (1,), (2,)])
def test_what_expired_is_told_from_damage(
    pushed: Pushed, gone: tuple[int, ...], first: int
) -> None:
    files = [anchor_of(pushed.url, 0) if v == 0 else payload(pushed.url, v) for v in gone]
    for file in files:
        file.unlink()
    report = ok("verify", pushed.url, "--from", first, "--json").document
    lost = {str(file.relative_to(pushed.url)) for file in files}
    assert lost >= set(report["expired"])
    assert report["not_rebuilt"]
    assert [v["version"] for v in report["versions"] if v["rebuilt"]][-1] == 3
    shown = ok("verify", pushed.url, "--from", first).stdout
    assert "expired" in shown
    flip(anchor_of(pushed.url, 3))  # and what is there must be right
    assert invoke("verify", pushed.url, "--from", first).code == 5


def test_a_document_never_expires(pushed: Pushed) -> None:
    (record,) = (pushed.url / "edges").glob("*/*")
    record.unlink()
    assert invoke("verify", pushed.url).code == (3 if head_lists(pushed.url, record) else 0)


def head_lists(url: Path, record: Path) -> bool:
    """Whether a manifest names an edge record."""
    names = [file.read_text() for file in (url / "manifests").iterdir()]
    return any(str(record.relative_to(url)) in text for text in names)


def test_a_manifest_that_is_gone_is_missed_even_when_the_hint_is(pushed: Pushed) -> None:
    (pushed.url / keys.manifest_key(1)).unlink()
    done = refused("verify", pushed.url, code=4, said="version 1 is missing")
    assert f"restore {keys.manifest_key(1)} from a backup" in done.told
    (first,) = re.findall(r"--from (\d+)", done.stderr)  # what lies behind it can be proven
    report = ok("verify", pushed.url, "--from", first, "--json").document
    assert (report["last"], report["not_rebuilt"]) == (3, [])
    (pushed.url / keys.HEAD_KEY).unlink()
    refused("verify", pushed.url, code=4, said="version 1 is missing")


def test_a_lost_manifest_behind_which_nothing_can_be_rebuilt_asks_for_an_anchor(
    pushed: Pushed,
) -> None:
    (pushed.url / keys.manifest_key(0)).unlink()
    for record in (pushed.url / "edges").glob("*/*"):
        record.unlink()
    done = refused("verify", pushed.url, "--to", 1, code=4)
    assert "no later version can be rebuilt: publish an anchor" in done.told
    assert "--from" not in done.stderr


def append(url: Path, edit: Callable[[Manifest], Manifest]) -> None:
    chain = Chain.open(open_store(url))
    head = present(chain.head())
    before = head.manifest
    manifest = Manifest(
        chain=before.chain, version=before.version + 1, epoch=before.epoch, commit_id="f" * 32,
        parent=head.digest, step=None, time=0.0, base_state=before.state, state=before.state,
        nnz=0, numel=before.numel, edge=Edge(kind="delta", base=before.version),
        recent=(*before.recent, before.summary()), window_from=before.window_from,
    )  # fmt: skip
    document = seal(edit(manifest))
    (url / keys.manifest_key(before.version + 1)).write_bytes(document)


def replaced(**fields: object) -> Callable[[Manifest], Manifest]:
    def edit(manifest: Manifest) -> Manifest:
        values = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
        return Manifest(**{**values, **fields})

    return edit


def test_an_epoch_that_goes_back_is_a_fork(pushed: Pushed) -> None:
    append(pushed.url, replaced(epoch=1))
    with pytest.raises(ForkedChainError, match="epoch 1 after epoch 3"):
        list(verify(Chain.open(open_store(pushed.url))))


def of_another_step(url: Path) -> None:
    rewrite(url, 2, lambda text: text.replace('"step":2', '"step":7'))


def without_a_window(url: Path) -> None:
    append(url, replaced(recent=()))


def from_another_state(url: Path) -> None:
    append(url, replaced(base_state="0" * 32))


def with_another_asset(url: Path) -> None:
    flip(next((url / "assets").glob("*/config.json")))


def with_another_table(url: Path) -> None:
    flip(url / keys.TABLE_KEY)


@pytest.mark.parametrize(
    ("tamper", "code", "said"),
    [
        (of_another_step, 4, "parent"),
        (without_a_window, 5, "lacks version 0"),
        (from_another_state, 5, "base state"),
        (with_another_asset, 5, "config.json"),
        (with_another_table, 5, "table.json"),
    ],
)
def test_a_document_that_was_tampered_with_is_found(
    pushed: Pushed, tamper: Callable[[Path], None], code: int, said: str
) -> None:
    tamper(pushed.url)
    refused("verify", pushed.url, code=code, said=said)


def test_a_head_that_claims_another_state_is_found(pushed: Pushed) -> None:
    state = str(present(Chain.open(open_store(pushed.url)).head()).state)
    rewrite(pushed.url, 3, lambda text: text.replace(state, "0" * 32))
    refused("verify", pushed.url, code=5, said=(state, "0" * 32))


def add_edge(url: Path, version: int, edge: Edge) -> None:
    chain = Chain.open(open_store(url))
    base = chain.read(edge.base) if edge.base is not None else None
    chain.add_edge(chain.read(version), edge, base.manifest.state if base else "")


def put_part(url: Path, kind: keys.PayloadKind, version: int, rows: list[Change]) -> Edge:
    key = keys.payload_key(kind, version, 9, "f" * 32, 0)
    part = encode_part(rows)
    file = url / key
    file.parent.mkdir(parents=True)
    file.write_bytes(part.data)
    ref = ObjectRef(key=key, nbytes=len(part.data), blake3=part.digest, directory=part.directory)
    return Edge(kind="anchor", encodings=part.encodings, parts=(ref,))


def test_a_skip_is_proven_to_lead_where_the_deltas_do(pushed: Pushed) -> None:
    rows = list(_skip(pushed.states[0], pushed.states[2]))
    edge = put_part(pushed.url, "skip", 2, rows)
    add_edge(pushed.url, 2, Edge(kind="skip", base=0, encodings=edge.encodings, parts=edge.parts))
    report = ok("verify", pushed.url, "--json").document
    assert report["edges"]["skip"]["proven"] == 1
    late = ok("verify", pushed.url, "--from", 1, "--json").document
    assert (late["edges"]["skip"]["edges"], late["edges"]["skip"]["proven"]) == (1, 0)
    assert "not proven" in ok("verify", pushed.url, "--from", 1).stdout


def _skip(old: State, new: State) -> list[Change]:
    rows = []
    for spec in SPECS:
        delta = changes(spec, old[spec.name], new[spec.name])
        assert delta.indices is not None
        key, values = digest_key(spec), new[spec.name][delta.indices]
        before = old[spec.name][delta.indices]
        change = host.digest_at(key, delta.indices, values)
        change -= host.digest_at(key, delta.indices, before)
        rows.append(Change(delta, change))
    return [row for row in rows if row.delta.nnz]


def whole(state: State, *specs: TensorSpec) -> list[Change]:
    """Rows that give tensors as they are in a state."""
    return [
        Change(
            TensorDelta.dense(one, state[one.name]), host.digest(digest_key(one), state[one.name])
        )
        for one in specs
    ]


@pytest.mark.parametrize(
    ("version", "specs", "code", "said"),
    [
        (1, SPECS, 5, "the anchor leads to another state than version 2"),
        (2, SPECS[:1], 4, "does not give"),
    ],
    ids=["of another state", "not whole"],
)
def test_an_anchor_that_is_not_that_of_its_version_is_found(
    pushed: Pushed, version: int, specs: tuple[TensorSpec, ...], code: int, said: str
) -> None:
    rows = whole(pushed.states[version], *specs)
    add_edge(pushed.url, 2, put_part(pushed.url, "anchor", 2, rows))
    refused("verify", pushed.url, code=code, said=said)


def test_a_row_that_lies_about_its_change_is_found(pushed: Pushed) -> None:
    spec = SPECS[0]
    bits = pushed.states[3][spec.name]
    delta = changes(spec, bits, bits + bits.dtype.type(1))
    assert delta.indices is not None
    told = TensorDelta(spec=spec, indices=delta.indices[:1], values=bits[:1] + 1, absolute=ABSOLUTE)
    edge = put_part(pushed.url, "delta", 4, [Change(told, StateDigest(1, 2))])
    lie = Edge(kind="delta", base=3, encodings=edge.encodings, parts=edge.parts)
    append(pushed.url, replaced(edge=lie))
    with pytest.raises(DigestMismatchError, match=r"embed\.weight"):
        list(verify(Chain.open(open_store(pushed.url))))


def test_an_empty_store_has_nothing_to_prove(tmp_path: Path, pushed: Pushed) -> None:
    assert invoke("verify", tmp_path / "nothing").code == 3
    for file in (pushed.url / "manifests").iterdir():
        file.unlink()
    (pushed.url / keys.HEAD_KEY).unlink()
    with pytest.raises(ChainError, match="no version yet"):
        list(verify(Chain.open(open_store(pushed.url))))

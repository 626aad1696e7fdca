import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import BucketFile, HfApi

from deltachain import errors
from deltachain.store import Store, open_store
from deltachain.store import calls as outage
from deltachain.testing.store import StoreContract, pattern
from tests.support.hub.server import HubServer
from tests.unit.store.calls import calls_of
from tests.unit.store.stub import took

BUCKET = "hf://buckets/me/b"
NO_BUCKETS = (
    *("hf://buckets/me", "hf://buckets/me/", "hf://me/model", "hf:/buckets/me/b"),
    *("hf://datasets/me/b/x", "hf://buckets/me/b?token=hushhush", "hf://buckets/me/b/x#hushhush"),
    *("hf://user:hushhush@buckets/me/b", "hf://buckets/me/b/../x", "hf://buckets/me/b/a//x"),
    "hf://buckets/me/b c/x",
)
BAD_OPTIONS: tuple[tuple[str, object], ...] = (
    *(("tokens", "x"), ("token", 5), ("calls", 0), ("calls", "many"), ("window_s", 0)),
    *(("deadline_s", True), ("deadline_s", "1"), ("s3_key", "alone"), ("s3_secret", "hushhush")),
)


@pytest.mark.parametrize(
    ("url", "options"),
    [*((url, {}) for url in NO_BUCKETS), *((BUCKET, {name: value}) for name, value in BAD_OPTIONS)],
    ids=str,
)
def test_wrong_url_or_option_is_refused_without_its_value(
    url: str, options: dict[str, object]
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        open_store(url, options)
    assert "hushhush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("hf://buckets/me/b", "hf://buckets/me/b"),
        ("hf://buckets/me/b/", "hf://buckets/me/b"),
        ("HF://buckets/me/b/run/1/", "hf://buckets/me/b/run/1"),
    ],
)
def test_url_is_shown_as_it_is_opened(url: str, shown: str) -> None:
    assert open_store(url).url == shown


def test_opening_sends_nothing(hub: HubServer, bucket: str) -> None:
    options = {"endpoint": hub.url, "token": "hf_unheard_of"}
    store = open_store(f"hf://buckets/{bucket}", options)
    assert store.requests == 0
    assert hub.counts("hf_unheard_of") == {}


def test_environment_is_read_when_a_store_is_opened(
    hub: HubServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_S3_ACCESS_KEY_ID", hub.s3_key)
    monkeypatch.setenv("HF_S3_SECRET_ACCESS_KEY", hub.s3_secret)
    monkeypatch.setenv("HF_S3_ENDPOINT", f"{hub.url}/s3/me")
    store = open_store(f"hf://buckets/{bucket}/x", writer=True)
    assert store.capabilities.conditional_put
    store.put_if_absent("a", b"data")
    assert store.get("a") == b"data"


def test_saved_token_is_used(
    hub: HubServer, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = tmp_path / "token"
    saved.write_text(hub.token)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(saved))
    store = open_store(f"hf://buckets/{bucket}", {"endpoint": hub.url})
    store.put("a", b"data")
    assert store.get("a") == b"data"


@pytest.mark.full
def test_budget_is_kept(hub: HubServer, opened: "Open") -> None:
    store = opened(calls=4, window_s=1.5)
    hub.configure(calls=4, window_s=1.0)  # less, by what a request may be late on its way
    start = time.monotonic()
    for _ in range(10):
        store.find("a")
    assert 2.9 < time.monotonic() - start < 12
    assert store.requests == 10  # none was refused and tried again


@pytest.mark.parametrize(
    ("writer", "calls", "given"), [(False, 100, ""), (True, 200, ""), (False, 2, "2")]
)
def test_spent_budget_says_how_to_allow_more(
    hub: HubServer,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    writer: bool,
    calls: int,
    given: str,
) -> None:
    if given:
        monkeypatch.setenv("DELTACHAIN_HF_CALLS", given)
    options = {"endpoint": hub.url, "token": hub.token}
    store = open_store(f"hf://buckets/{bucket}", options, writer=writer)
    before = hub.counts().get("POST paths-info", 0)
    for _ in range(calls):
        store.find("a")
    error, seconds = took(lambda: store.find("a"))
    assert f"{calls} requests in 300 s" in str(error)
    assert "DELTACHAIN_HF_CALLS" in error.hint
    assert seconds < 60
    assert hub.counts()["POST paths-info"] - before == store.requests == calls


def test_a_budget_of_the_environment_that_is_no_number_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELTACHAIN_HF_CALLS", "few")
    with pytest.raises(errors.ConfigError, match="DELTACHAIN_HF_CALLS"):
        open_store(BUCKET)


@pytest.mark.parametrize(
    ("missing", "extra", "options"),
    [
        ("huggingface_hub", "hf", {}),
        ("hf_xet", "hf", {}),
        ("boto3", "s3", {"s3_key": "k", "s3_secret": "s"}),
    ],
)
def test_missing_library_is_named(
    missing: str, extra: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setitem(sys.modules, f"{missing}.utils", None)
    with pytest.raises(errors.ConfigError) as caught:
        open_store(BUCKET, options)
    assert f"deltachain[{extra}]" in caught.value.hint


def test_offline_mode_is_named(opened: "Open", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(errors.ConfigError) as caught:
        opened().find("a")
    assert "HF_HUB_OFFLINE" in caught.value.hint


def test_import_loads_no_library_of_the_hub() -> None:
    code = (
        "import sys, deltachain, deltachain.store; "
        "print({'huggingface_hub', 'hf_xet', 'boto3', 'httpx2'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_nothing_is_printed(
    opened: "Open", capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    with caplog.at_level(logging.WARNING):
        pin = store.put("a", bytes(9_000_000))
        store.read("a", nbytes=9_000_000, pin=pin)
        store.get("a")
        list(store.list())
        store.delete("a")
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


@pytest.mark.parametrize("endpoint", ["http://nohost.invalid", "http://127.0.0.1:9"])
@pytest.mark.parametrize("given", ["HF_ENDPOINT", "the option"])
def test_a_wrong_endpoint_is_given_up_soon_and_its_variable_named(
    given: str, endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outage, "FIRST_S", 0.2)
    monkeypatch.setattr(outage, "REPORT_S", 0.0)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    secret = endpoint.replace("http://", "http://me:canary7secret@")
    options = {"endpoint": secret} if given == "the option" else {}
    if not options:
        monkeypatch.setenv("HF_ENDPOINT", secret)
    began = time.monotonic()
    with pytest.raises(errors.StoreUnavailableError) as caught:
        open_store("hf://buckets/me/b", {**options, "deadline_s": 600.0}).find("a")
    assert time.monotonic() - began < 5
    where = "of the option endpoint" if options else "in HF_ENDPOINT"
    said = f"nothing answers at {endpoint}, the endpoint {where}"
    assert said in str(caught.value.args[0])
    assert "check host and port" in caught.value.hint
    assert f"{said}; trying again for" in caplog.text
    assert "canary7secret" not in str(caught.value) + caplog.text


@pytest.mark.parametrize(
    "endpoint",
    ["host", "host:80", "ftp://host", "http://", "http://host:99999", "http://u:canary7secret/x@h"],
)
def test_an_endpoint_that_is_no_address_is_refused(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(errors.ConfigError, match="in HF_ENDPOINT, is no address") as caught:
        open_store("hf://buckets/me/b")
    assert caught.value.__context__ is None
    assert "canary7secret" not in str(caught.value)


Open = Callable[..., Store]


class TestHfStore(StoreContract):
    """With a single writer, as the Hub's API allows."""

    race_rounds = 5

    @pytest.fixture
    def store(self, opened: Open) -> Store:
        return opened()

    @pytest.fixture
    def reopen(self, opened: Open) -> Open:
        return opened


@pytest.mark.full
class TestHfStoreWithGateway(StoreContract):
    """With conditional writes."""

    race_rounds = 5

    @pytest.fixture
    def reopen(self, opened: Open, gateway: dict[str, str]) -> Open:
        return lambda: opened(**gateway)

    @pytest.fixture
    def store(self, reopen: Open) -> Store:
        return reopen()


def test_capabilities(opened: Open, gateway: dict[str, str]) -> None:
    alone, shared = opened().capabilities, opened(**gateway).capabilities
    assert (alone.conditional_put, shared.conditional_put) == (False, True)
    assert (alone.list_consistent, alone.probes, alone.poll_s) == (False, 1000, 5.0)


def test_pinned_read_outlives_overwrite_and_delete(opened: Open) -> None:
    store = opened()
    pin = store.put("a", b"old content")
    store.put("a", b"new")
    assert bytes(store.read("a", nbytes=11, pin=pin)) == b"old content"
    store.delete("a")
    assert bytes(opened().read("a", nbytes=11, pin=pin)) == b"old content"


def test_find_tells_the_pin_that_put_returned(opened: Open) -> None:
    store = opened()
    pins = {key: store.put(key, key.encode()) for key in ("a", "b/c")}
    assert {key: info.pin for key, info in store.find_all([*pins, "absent"]).items()} == pins
    assert {info.key: info.pin for info in store.list()} == pins


def test_a_pin_of_no_content_is_refused(opened: Open) -> None:
    """Malformed ones at once, and that of nothing for anything else."""
    store = opened()
    for pin in ("x", "zz" * 32, "ab" * 31, "../" * 21 + "a", "AB" * 32):
        with pytest.raises(errors.MalformedError, match="not a Xet hash"):
            store.read("a", nbytes=1, pin=pin)
    assert store.requests == 0
    with pytest.raises(errors.ObjectNotFoundError) as caught:
        store.read("a", nbytes=5, pin="ab" * 32)
    assert caught.value.key == "a"
    empty = store.put("a", b"")
    with pytest.raises(errors.MalformedError):
        store.read("a", nbytes=1, pin=empty)


def test_prefixes_are_apart(opened: Open) -> None:
    stores = {prefix: opened(prefix) for prefix in ("", "run", "run/1", "run-2")}
    for prefix, store in stores.items():
        store.put(f"key{len(prefix)}", prefix.encode())
    assert [info.key for info in stores["run/1"].list()] == ["key5"]
    assert [info.key for info in stores["run-2"].list("key")] == ["key5"]
    assert [info.key for info in stores["run"].list()] == ["1/key5", "key3"]
    assert stores["run"].get("1/key5") == b"run/1"
    assert len(list(stores[""].list("run"))) == 3


def test_listing_goes_over_pages_and_look_ups_over_requests(hub: HubServer, opened: Open) -> None:
    store = opened()
    keys = [f"k/{number:02}" for number in (7, 3, 9, 1, 5, 8, 2)]
    for key in keys:
        store.put(key, b"data")
    hub.configure(page=3, calls=1_000_000)
    before = store.requests
    assert [info.key for info in store.list("k/")] == sorted(keys)
    assert store.requests - before == 3
    hub.configure(page=1000, calls=1_000_000)
    before = store.requests
    absent = [f"absent/{number}" for number in range(1500)]
    assert set(store.find_all([*absent, *keys])) == set(keys)
    assert store.requests - before == 2


@pytest.mark.full
def test_requests_are_those_that_the_hub_counts(
    hub: HubServer, opened: Open, gateway: dict[str, str]
) -> None:
    hub.restart()  # counts from nothing
    store, shared = opened(), opened("shared", **gateway)
    spent: list[int] = []
    calls: list[Callable[[], object]] = [
        lambda: store.put("a", b"data"),
        lambda: store.put("a", b"other"),
        lambda: store.put_if_absent("b", b"data"),
        lambda: store.find_all(["a", "b", "c"]),
        lambda: store.get("a"),
        lambda: store.get("a"),
        lambda: store.get_range("a", 1, 2),
        lambda: list(store.list()),
        lambda: store.delete("a"),
        lambda: store.delete("a"),
        lambda: shared.put_if_absent("b", b"data"),
    ]
    for call in calls:
        before = store.requests + shared.requests
        call()
        spent.append(store.requests + shared.requests - before)
    pin = store.put("a", b"data")
    before = store.requests
    store.read("a", nbytes=4, pin=pin)
    assert store.requests == before
    # The first put and the first read have a storage token to get.
    assert spent == [2, 1, 2, 1, 2, 1, 1, 1, 1, 2, 1]
    counted = hub.counts()
    assert sum(counted.values()) + sum(hub.counts("s3").values()) == (
        store.requests + shared.requests
    )
    assert counted == {
        "GET xet-write-token": 1,
        "GET xet-read-token": 1,
        "GET tree": 1,
        "POST batch": 6,
        "POST paths-info": 6,
    }
    assert hub.counts("s3") == {"PUT s3": 1}


@pytest.mark.full
def test_storage_token_is_renewed_before_it_ends(hub: HubServer, opened: Open) -> None:
    hub.configure(xet_token_s=62, calls=1_000_000)
    store = opened()
    pin = store.put("a", b"data")
    store.read("a", nbytes=4, pin=pin)
    before = store.requests
    time.sleep(2.1)
    assert bytes(store.read("a", nbytes=4, pin=pin)) == b"data"
    assert store.requests == before + 1


def test_large_object_is_put_without_a_copy_on_disk(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    data = pattern(20_000_000)
    store = opened()
    store.put("a", memoryview(data))
    assert store.get_range("a", 9_999_990, 20) == data[9_999_990:10_000_010]


def test_missing_bucket_does_not_look_empty(hub: HubServer) -> None:
    store = open_store("hf://buckets/me/absent", {"endpoint": hub.url, "token": hub.token})
    for call in calls_of(store, "get", "find", "put", "list", "delete"):
        with pytest.raises(errors.ConfigError, match="no bucket me/absent") as caught:
            call()
        assert "hf buckets create me/absent" in caught.value.hint


def test_stock_clients_find_and_delete_what_was_put(
    hub: HubServer, bucket: str, opened: Open
) -> None:
    store, api = opened(), HfApi(endpoint=hub.url, token=hub.token)
    pins = {f"run/1/{key}": store.put(key, b"data") for key in ("a", "b/c")}
    listed = api.list_bucket_tree(bucket, "run", recursive=True)
    assert {entry.path: entry.xet_hash for entry in listed if isinstance(entry, BucketFile)} == pins
    infos = api.get_bucket_paths_info(bucket, ["run/1/a", "none"])
    assert [(info.path, info.size) for info in infos] == [("run/1/a", 4)]
    api.batch_bucket_files(bucket, delete=["run/1/a"])
    assert [info.key for info in store.list()] == ["b/c"]

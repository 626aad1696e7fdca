import operator
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any, Final

import httpx
import pytest
import yaml
from msgspec.structs import replace
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deltachain import errors, metrics
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.heartbeat import judge_age, read_heartbeat, write_heartbeat
from deltachain.chain.trust import Trust
from deltachain.format.documents import Edge, Heartbeat, unseal
from deltachain.format.keys import HEARTBEAT_KEY, manifest_key
from deltachain.mirror import Mirror
from deltachain.publish.side_threads import HeartbeatThread
from deltachain.publish.writer import Writer
from deltachain.status import Health, HealthLimits, Status, complaints, judged
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.hostile.signed import MALLORY, NOBODY, SPEC, Author, Follower, bits_of, key_of, trust_of
from tests.support.values import eventually, present
from tests.unit.control.replicas import status

ALERTS: Final = Path(__file__).parents[2] / "examples" / "deploy" / "prometheus" / "alerts.yml"

RULES: Final[Mapping[str, Health]] = {
    "ReplicaNotReady": "not ready",
    "StoreSilent": "cut off",
    "ReplicaBehind": "stale",
    "WeightsUnknown": "poisoned",
}
"""Alert rules about a single replica, and the health that each tells."""

LIMITS: Final = HealthLimits(lag=4)

COMPARED: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "==": operator.eq,
    ">": operator.gt,
}

SILENT: Final[Sequence[dict[str, Any]]] = ({}, {"silence_s": 60.0}, {"silence_s": 61.0})

STATUSES: Final = [
    status(version, head=7, following=following, pinned=pinned, poisoned=poisoned, **more)
    for version in (7, 3, 2, None)
    for following, pinned, poisoned in product((True, False), repeat=3)
    for more in (*SILENT, {"ready": False, "reason": "paused"})
]


def figures_of(one: Status) -> dict[str, float]:
    """The figures of a replica that rules read, as a replica gives them."""
    lag = None if one.version is None or one.head is None else one.head - one.version
    silence_s = one.silence_s if one.following else None
    found = {
        "deltachain_ready": float(one.ready),
        "deltachain_poisoned": float(one.poisoned),
        "deltachain_pinned": float(one.pinned),
        "deltachain_lag_versions": lag,
        "deltachain_silence_seconds": silence_s,
    }
    return {name: value for name, value in found.items() if value is not None}


def fires(expression: str, found: Mapping[str, float]) -> bool:
    """Evaluate a comparison, but for an exception after ``unless``."""
    rule, _, exception = expression.partition(" unless on (instance) ")
    match = re.fullmatch(r"(\w+) (==|>) (\d+)", rule)
    assert match is not None, rule
    name, compared, number = match.groups()
    holds = name in found and COMPARED[compared](found[name], float(number))
    return holds and not (exception and fires(exception, found))


@pytest.mark.parametrize("name", RULES)
def test_an_alert_rule_fires_where_the_rule_of_health_complains(name: str) -> None:
    rules: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    (expression,) = (one["expr"] for one in rules if one.get("alert") == name)
    told = [
        (one, any(health == RULES[name] for health, _ in complaints(one, LIMITS)))
        for one in STATUSES
    ]
    assert {complains for _, complains in told} == {True, False}
    for one, complains in told:
        assert fires(expression, figures_of(one)) == complains, one


@pytest.mark.parametrize(
    ("found", "waits", "reason"),
    [
        (status(), "", ""),
        (status(), "paused", "paused"),
        (status(fault="the engine is dead"), "paused", "the engine is dead"),
        (status(poisoned=True, doubt="lost"), "paused", "poisoned: it cannot prove what it holds"),
        (status(doubt="the store went back"), "paused", "paused"),
        (status(doubt="the store went back"), "", "the store went back"),
        (status(2, head=7), "", "5 versions behind"),
        (status(2, head=7, pinned=True), "", ""),
        (status(3, head=7), "", ""),
        (status(silence_s=61.0), "", "its store has not answered for 61 s, more than 60 s"),
        (status(silence_s=61.0, following=False), "", ""),
    ],
)
def test_the_readiness_of_a_replica(found: Status, waits: str, reason: str) -> None:
    one = judged(found, LIMITS, waits)
    assert (one.ready, one.reason) == (not reason, reason)


def shown() -> Iterator[metrics.Figure]:
    yield metrics.info(engine="fake/1.0", chain="c")
    yield from metrics.figures({"version": 7, "lag_versions": None, "applies": 3})
    yield from metrics.phases({"fetch": 0.5, "swap": 0.25})


def samples(text: str) -> dict[tuple[str, str], float]:
    """Value of every sample, by its name, and its chain or phase."""
    return {
        (one.name, one.labels.get("chain") or one.labels.get("phase", "")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_figures_are_what_prometheus_reads() -> None:
    found = samples(metrics.exposition(shown).decode())
    assert (found["deltachain_version", ""], found["deltachain_applies_total", ""]) == (7, 3)
    assert (found["deltachain_info", "c"], found["deltachain_phase_seconds", "fetch"]) == (1, 0.5)
    assert found["deltachain_phase_seconds", "swap"] == 0.25
    assert not [name for name, _ in found if "lag" in name]


def test_the_registry_of_the_process_shows_the_last_source() -> None:
    metrics.register_figures(shown)
    metrics.register_figures(lambda: metrics.figures({"version": 8}))
    found = samples(generate_latest(REGISTRY).decode())
    assert found["deltachain_version", ""] == 8
    assert ("deltachain_info", "c") not in found


def test_the_server_answers_scrapes_and_probes() -> None:
    reason = ""
    with metrics.MetricsServer("0", shown, lambda: reason) as server, httpx.Client() as client:
        answer = client.get(f"{server.url}/metrics")
        assert samples(answer.text)["deltachain_version", ""] == 7
        assert samples(answer.text)["deltachain_ready", ""] == 1
        assert client.get(f"{server.url}/healthz").text == "ok\n"
        assert client.get(f"{server.url}/readyz").status_code == 200
        reason = "its store has not answered for 7 s"
        text = client.get(f"{server.url}/metrics").text
        assert samples(text)["deltachain_ready", ""] == 0
        refused = client.get(f"{server.url}/readyz")
        assert (refused.status_code, refused.text) == (503, f"not ready: {reason}\n")
        assert client.get(f"{server.url}/healthz").status_code == 200
        assert client.get(f"{server.url}/").status_code == 404
        assert client.post(f"{server.url}/metrics").status_code == 405
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz")
    server.close()


def test_a_failing_source_and_silent_clients_do_not_end_the_server() -> None:
    def failing() -> Iterator[metrics.Figure]:
        raise RuntimeError("no figure")

    with metrics.MetricsServer("0", failing) as server:
        port = httpx.URL(server.url).port or 0
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        silent[0].sendall(b"\xff\xfe nothing that HTTP knows\r\n\r\n")
        silent[1].sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 100_000)
        assert httpx.get(f"{server.url}/metrics").status_code == 500
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        for one in silent:
            one.close()


ADDRESSES: Final = {
    "9095": ("127.0.0.1", 9095),
    " 0 ": ("127.0.0.1", 0),
    "0.0.0.0:9095": ("0.0.0.0", 9095),  # noqa: S104 - only parsed
    "[::1]:9095": ("::1", 9095),
    ":9095": ("127.0.0.1", 9095),
}


@pytest.mark.parametrize("text", ADDRESSES)
def test_an_address_is_a_port_or_a_host_and_a_port(text: str) -> None:
    assert metrics.parse_address(text) == ADDRESSES[text]


@pytest.mark.parametrize("text", ["", "host", "host:", "70000", "-1", "host:x", "٣", "1.5"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(errors.ConfigError, match="no address to serve at") as caught:
        metrics.parse_address(text)
    assert "9095" in caught.value.hint


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_taken_port_is_named(host: str) -> None:
    with metrics.MetricsServer(f"{host}:0", shown) as server:
        port = httpx.URL(server.url).port
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        with pytest.raises(errors.ConfigError, match=f"cannot be served at .*:{port}") as caught:
            metrics.MetricsServer(f"{host}:{port}", shown)
        assert "free port" in caught.value.hint


LIMIT_S = 60.0


def follower_of(store: MemoryStore, *, mirror: bool = False) -> Follower:
    """A follower that trusts the owner, and for a minute."""
    follower = Follower(store, 1)
    config = SubscribeConfig(
        url=store.url,
        trusted_keys=str(key_of(1).public),
        max_heartbeat_age_s=LIMIT_S,
        poll_s=0.001,
        mirror=mirror,
    )
    follower.subscriber = Subscriber(config, {SPEC.name: follower.tensor}, store=store)
    return follower


def head_of(author: Author) -> Committed:
    assert author.parent is not None
    return author.parent


def beat(author: Author, *, age: float = 0.0, head: Committed | None = None) -> None:
    write_heartbeat(author.chain, head or head_of(author), now=time.time() - age, tags={})


AUTHOR = Author().grow(2)
HEAD = head_of(AUTHOR)
NOW = HEAD.manifest.time


def heartbeat(version: int = 1, manifest: str = HEAD.digest, age: float = 0.0) -> Heartbeat:
    return Heartbeat(chain="c", version=version, manifest=manifest, time=NOW + 1000 - age)


@pytest.mark.parametrize(
    ("after", "found", "error"),
    [
        (0, None, ""),
        (LIMIT_S, None, ""),
        (LIMIT_S + 1, None, "61 s old, more than 60 s"),
        (1000, heartbeat(), ""),
        (1000, heartbeat(age=LIMIT_S), ""),
        (1000, heartbeat(age=LIMIT_S + 1), "61 s old"),
        (1000, heartbeat(manifest="0" * 64), "1000 s old"),
        (1000, heartbeat(version=0, manifest="0" * 64), "1000 s old"),
        (0, heartbeat(version=2), "names version 2"),
    ],
)
def test_a_version_is_as_young_as_its_last_sign(
    after: float, found: Heartbeat | None, error: str
) -> None:
    stale = judge_age(HEAD, found, now=NOW + after, most_s=LIMIT_S, url="u")
    assert (stale is None) == (not error)
    assert error in str(stale)


def test_a_newcomer_joins_only_while_the_publisher_gives_signs() -> None:
    author = Author().grow(2)  # of 2023
    follower = follower_of(author.store)
    with pytest.raises(errors.StaleChainError, match="more than 60 s") as caught:
        follower.subscriber.update()
    assert caught.value.retryable
    assert not follower.holds(bits_of(1))
    beat(author)
    follower.subscriber.update()
    assert follower.holds(bits_of(1))


def test_a_store_that_withholds_versions_is_found_out_by_the_heartbeat() -> None:
    author = Author().grow(2)
    beat(author.grow(1))
    author.store.delete(manifest_key(2))
    follower = follower_of(author.store)
    with pytest.raises(errors.StaleChainError, match="its heartbeat names version 2"):
        follower.subscriber.update()
    author.store.delete(HEARTBEAT_KEY)  # so it has to be withheld as well
    with pytest.raises(errors.StaleChainError, match="more than 60 s"):
        follower.subscriber.update()


def test_a_follower_serves_on_and_says_that_the_chain_is_stale() -> None:
    author = Author().grow(2)
    beat(author)
    follower, stop = follower_of(author.store), Event()
    seen: list[errors.DeltaChainError | None] = []

    def looked(error: errors.DeltaChainError | None) -> None:
        seen.append(error)
        if isinstance(error, errors.StaleChainError):
            beat(author)
        if error is None and any(isinstance(one, errors.StaleChainError) for one in seen):
            stop.set()
        elif error is None and len(seen) == 20:
            beat(author, age=LIMIT_S + 1)
        assert len(seen) < 1000

    assert len(list(follower.subscriber.follow(stop=stop, looked=looked))) == 1
    assert seen[:20] == [None] * 20
    assert follower.holds(bits_of(1))


def lagging(author: Author) -> tuple[Follower, Committed]:
    """A follower of a mirror that lags behind what it holds, and what the mirror has."""
    beat(author)
    follower = follower_of(author.store, mirror=True)
    follower.subscriber.update()
    older = author.chain.read(0)
    author.store.delete(manifest_key(1))  # as if it were not copied yet
    beat(author, head=older)
    return follower, older


def test_a_mirror_that_is_behind_is_stale_once_its_sign_is_too_old() -> None:
    author, stop = Author().grow(2), Event()
    follower, older = lagging(author)
    seen: list[errors.DeltaChainError | None] = []

    def looked(error: errors.DeltaChainError | None) -> None:
        seen.append(error)
        if isinstance(error, errors.StaleChainError):
            stop.set()
        elif isinstance(error, errors.MirrorLagsError):
            beat(author, age=LIMIT_S + 1, head=older)
        assert len(seen) < 1000

    list(follower.subscriber.follow(stop=stop, looked=looked))
    assert [type(one) for one in seen if one is not None] == [
        errors.MirrorLagsError,
        errors.StaleChainError,
    ]
    assert "61 s old" in follower.subscriber.status().trouble


def test_an_older_version_that_is_asked_for_needs_no_sign() -> None:
    follower = follower_of(Author().grow(3).store)
    follower.subscriber.update(1)
    assert follower.holds(bits_of(1))


def forged(
    data: bytes, trust: Trust = NOBODY, signed: str = f"{7:032x}", **fields: object
) -> bytes:
    found = unseal(data, Heartbeat, key=HEARTBEAT_KEY)
    return trust.seal(replace(found, **fields), signed)


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "by nobody": lambda data: forged(data, time=time.time()),
    "by another key": lambda data: forged(data, MALLORY, time=time.time()),
    "of another chain": lambda data: forged(data, trust_of(1, key=1), "b" * 32, chain="b" * 32),
    "of another version": lambda data: data.replace(b'"version":1', b'"version":0'),
    "nothing": lambda _: b"{}",
    "large": lambda _: b"x" * (1 << 17),
    "a manifest": lambda _: Author().grow(2).store.get(manifest_key(1)),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_heartbeat_that_no_trusted_key_signed_is_no_sign(forge: Callable[[bytes], bytes]) -> None:
    author = Author().grow(2)
    beat(author, age=10 * LIMIT_S)
    author.store.put(HEARTBEAT_KEY, forge(author.store.get(HEARTBEAT_KEY)))
    follower = follower_of(author.store)
    with pytest.raises(errors.FormatError):
        follower.subscriber.update()
    assert not follower.holds(bits_of(1))


def test_a_limit_of_age_needs_trusted_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACHAIN_MAX_HEARTBEAT_AGE_S", "60")
    with pytest.raises(errors.ConfigError, match="without DELTACHAIN_TRUSTED_KEYS"):
        Chain.open(Author(NOBODY).grow(1).store)
    monkeypatch.setenv("DELTACHAIN_TRUSTED_KEYS", str(key_of(1).public))
    assert Trust.of_reader().max_age_s == 60
    assert Trust.of_reader(max_age_s=5).max_age_s == 5
    assert Trust.of_writer().max_age_s is None


@contextmanager
def beating(author: Author, *, leads: bool = True) -> Iterator[Writer]:
    writer = Writer(author.chain, numel=SPEC.numel, metadata={}, parent=author.parent)
    thread = HeartbeatThread(writer, leads=leads, every_s=0.02)
    try:
        yield writer
    finally:
        thread.close()
        thread.close()


def seen_in(author: Author) -> Heartbeat | None:
    return read_heartbeat(Chain.open(author.store, trust_of(1)))


def test_a_publisher_with_a_key_renews_its_heartbeat_while_it_is_idle() -> None:
    author = Author().grow(2)
    with beating(author) as writer:
        eventually(lambda: seen_in(author))
        first = present(seen_in(author))
        assert (first.version, first.manifest) == (1, head_of(author).digest)
        eventually(lambda: (seen_in(author) or first).time > first.time)
        writer.parent = head_of(author.grow(1))
        eventually(lambda: (seen_in(author) or first).version == 2)


def test_a_clock_that_is_set_back_delays_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    author, now, ahead = Author().grow(2), time.monotonic, 3600.0
    with monkeypatch.context() as patched:
        patched.setattr("deltachain.publish.side_threads.time.time", lambda: now() + ahead)
        with beating(author):
            eventually(lambda: seen_in(author))
            first = present(seen_in(author))
            ahead = 0.0
            eventually(lambda: (seen_in(author) or first).time < first.time - 3000)


@pytest.mark.parametrize("why", ["no key", "another rank", "fenced"])
def test_a_publisher_writes_no_heartbeat(why: str) -> None:
    author = Author(NOBODY if why == "no key" else trust_of(1, key=1)).grow(2)
    head = author.parent
    if why == "fenced":
        author.grow(1)
        author.parent = head
    with beating(author, leads=why != "another rank"):
        time.sleep(0.2)
    assert author.store.find(HEARTBEAT_KEY) is None


def commit_ahead(author: Author, ahead_s: float) -> None:
    """Commit a version of the future."""
    last, later = head_of(author), time.time() + ahead_s
    edge = Edge(kind="delta", base=1)
    fresh = replace(last.manifest, version=2, parent=last.digest, edge=edge, time=later)
    author.parent = author.chain.commit(fresh)


def test_a_publisher_that_has_just_committed_renews_its_heartbeat_too() -> None:
    author = Author().grow(2)
    commit_ahead(author, 5)
    with beating(author):
        eventually(lambda: (seen_in(author) or heartbeat(0)).version == 2)


def test_a_heartbeat_that_cannot_be_written_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    author = Author().grow(2)

    def refuse(_key: str, _data: bytes) -> str:
        raise errors.SignatureError("no", key=HEARTBEAT_KEY)

    monkeypatch.setattr(author.store, "put", refuse)
    writer = Writer(author.chain, numel=SPEC.numel, metadata={}, parent=author.parent)
    with closing(HeartbeatThread(writer, leads=True, every_s=0.02)) as thread:
        eventually(lambda: "no heartbeat" in caplog.text)
        time.sleep(0.1)
        assert caplog.text.count("no heartbeat") == 1
        assert thread.trouble == "no heartbeat: no"
        monkeypatch.undo()
        eventually(lambda: not thread.trouble)
        monkeypatch.setattr(author.store, "list", lambda _: 1 // 0)
        eventually(lambda: "division" in thread.trouble)  # any exception
        monkeypatch.undo()
        eventually(lambda: not thread.trouble)


@pytest.mark.parametrize("what", ["version", "heartbeat"])
def test_a_sign_of_the_future_is_none(what: str) -> None:
    author = Author().grow(2)
    if what == "version":
        commit_ahead(author, 3600)
    else:
        beat(author, age=-3600)
    follower = follower_of(author.store)
    with pytest.raises(errors.StaleChainError, match="3600 s in the future") as caught:
        follower.subscriber.update()
    assert "set the clocks" in caught.value.hint


def test_a_mirror_doubts_a_source_without_a_recent_sign() -> None:
    author, there = Author().grow(2), MemoryStore()
    trust = Trust(trusted=trust_of(1).trusted, max_age_s=LIMIT_S)
    with pytest.raises(errors.StaleChainError, match="the last sign of its publisher"):
        list(Mirror(author.store, there, trust=trust).catch_up())
    assert there.find(manifest_key(1)) is not None  # everything is copied
    beat(author)
    list(Mirror(author.store, there, trust=trust).catch_up())

"""The examination: checks of machine, store and chain, in the order of their dependence."""

import math
import os
import platform
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import closing, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from threading import Barrier
from typing import Any, Final, Protocol
from uuid import uuid4

from deltachain import errors
from deltachain.chain.chain import Chain, Committed, plan_present
from deltachain.chain.identity import refuse_mirror
from deltachain.chain.plan import Plan
from deltachain.chain.trust import SigningKey, Trust
from deltachain.control.replica_client import make_client
from deltachain.control.roster import parse_inventory
from deltachain.disk_space import NoRoomError, check_room
from deltachain.doctor import Finding, Grade, Role, failed, fault, note, ok, tried
from deltachain.environment import FROM_FILE, PREFIX, mistakes, read
from deltachain.errors import ConfigError
from deltachain.format.keys import CHAIN_KEY, manifest_key, trial_key
from deltachain.presence.writer import interval_s
from deltachain.redact import redacted_path, redacted_url
from deltachain.replica.capabilities import CapabilityTable
from deltachain.replica.settings import ReplicaSettings, spool_folder
from deltachain.retry import between_polls
from deltachain.store import ObjectInfo, Store, check_apart, open_store
from deltachain.subscribe.history import require
from deltachain.threads import Pool
from deltachain.tls import TlsFiles
from deltachain.tokens import Tokens
from deltachain.version import __version__

PACKAGES: Final = "packages"
ENGINE: Final = "engine"
ENVIRONMENT: Final = "environment"
FILES: Final = "files"
TRANSPORT: Final = "transport"

NEEDED: Final = {Role.PUBLISHER: ("torch",), Role.FOLLOWER: ()}  # extras, whatever the URL
UNUSED: Final = {Role.PUBLISHER: (), Role.FOLLOWER: ("quantization", "trl")}  # of extras

ENGINES: Final = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}

_REQUIREMENT: Final = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?>=(?P<floor>[0-9.]+)"
    r"(?:.*extra == ['\"](?P<extra>[a-z0-9]+)['\"])?"
)


class StartCheck(Protocol):
    """``start_check.check`` of an engine's plugin: yields what a server refuses at its start.

    Beside it is ``TABLE``, a :class:`CapabilityTable` of the engine's names.
    """

    def __call__(self, installed: str, environment: Mapping[str, str], /) -> Iterator[ConfigError]:
        """Yield the errors, given the engine's version and the environment variables."""


def check_packages(role: Role) -> Iterator[Finding]:
    yield ok(PACKAGES, f"deltachain {__version__}, Python {platform.python_version()}")
    present, absent = set[str](), set[str]()
    matches = map(_REQUIREMENT.match, requires("deltachain") or ())
    for match in (one for one in matches if one and one["extra"] != "all"):
        installed = _installed(match["name"])
        (absent if installed is None else present).add(match["extra"] or "")
        if installed is not None and _numbers(installed) < _numbers(match["floor"]):
            wanted = f"{match['name']}>={match['floor']}"
            said = f"{match['name']} {installed} is older than {match['floor']}"
            if match["extra"] in UNUSED[role]:
                yield note(PACKAGES, said)  # an engine may pin it
            else:
                yield fault(PACKAGES, said, f'pip install "{wanted}"')
    for extra in NEEDED[role]:
        if extra in absent:
            hint = f"pip install 'deltachain[{extra}]'"
            yield fault(PACKAGES, f"a {role} needs the extra {extra}, which is not installed", hint)
    yield from _check_torch(role)
    if whole := sorted(present - absent - {""}):
        yield ok(PACKAGES, f"extras: {', '.join(whole)}")
    if absent - {""}:
        yield note(PACKAGES, f"extras that are not installed: {', '.join(sorted(absent - {''}))}")


def _check_torch(role: Role) -> Iterator[Finding]:
    """Import torch, if installed: it may lack a library, or be built for another machine."""
    installed = _installed("torch")
    try:
        if installed is not None:
            import_module("torch")
    except Exception as exc:  # noqa: BLE001 - runs its code
        said = f"torch {installed} cannot be imported: {type(exc).__name__}: {exc}"
        graded = fault if "torch" in NEEDED[role] else note
        yield graded(PACKAGES, said, "pip install --force-reinstall torch")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """Return the release of a version, without trailing zeros."""
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def check_engines(environment: Mapping[str, str]) -> Iterator[Finding]:
    releases = {name: release for name in ENGINES if (release := _installed(name))}
    if not releases:
        yield note(ENGINE, f"neither vLLM nor SGLang is installed for {sys.executable}")
    for name, release in releases.items():
        plugins = [one for one in entry_points(group=ENGINES[name]) if one.name == "deltachain"]
        if not plugins:
            yield fault(
                ENGINE,
                f"{name} {release} does not see deltachain's plugin",
                "install deltachain anew, into the environment of the engine",
            )
            continue
        start_check = import_module(f"{plugins[0].module}.start_check")
        check: StartCheck = start_check.check
        table: CapabilityTable = start_check.TABLE
        wrong = list(check(release, environment))
        yield from (failed(ENGINE, error) for error in wrong)
        if not wrong:
            yield ok(ENGINE, f"{name} {release} loads the plugin")
        yield from (note(ENGINE, remark) for remark in table.remarks(release))
        lacks = table.lacks()
        for row in (row for row in table.rows if row not in lacks):
            yield ok(ENGINE, f"{name} {release} has all names by which deltachain {row.does}")


def check_names(environment: Mapping[str, str]) -> Iterator[Finding]:
    wrong = dict(mistakes(environment))
    yield from (failed(ENVIRONMENT, error) for error in wrong.values())
    given = read({name: text for name, text in environment.items() if name not in wrong})
    if given:
        shown = (f"{PREFIX}{name}={_shown(name, value)}" for name, value in given.items())
        yield ok(ENVIRONMENT, " ".join(shown))
    elif not wrong:
        yield note(ENVIRONMENT, "no DELTACHAIN_* variable is set")


def _shown(name: str, value: Any) -> str:  # noqa: ANN401 - as it is parsed
    """Return a value, unless it is a secret, or a text that may be one by mistake."""
    if isinstance(value, Path):
        return redacted_path(value)
    if not isinstance(value, str):
        return str(int(value)) if isinstance(value, bool) else str(value)
    if name in ("URL", "DRAFT_URL", "PRESENCE_URL"):
        return redacted_url(value)
    return value if name == "DECODE" else "(set)"


def check_files(environment: Mapping[str, str]) -> Iterator[Finding]:
    given = read(environment)
    for name in FROM_FILE:
        if (file := given.get(f"{name}_FILE")) is not None:
            yield from tried(FILES, partial(_tokens, file))
    if (signing := given.get("SIGNING_KEY")) is not None:
        shown = redacted_path(signing)
        yield from tried(FILES, lambda: f"{shown}: key {SigningKey.load(signing).public}")
        yield from _exposed(signing)
    if "TRUSTED_KEYS" in given or "MAX_HEARTBEAT_AGE_S" in given:
        yield from tried(FILES, lambda: _trusted(environment))
    if "ENGINES" in given:
        yield from tried(FILES, lambda: _engines(given["ENGINES"]))
    if (base := given.get("BASE")) is not None and not base.is_dir():
        said = f"{PREFIX}BASE is {redacted_path(base)}, which is no folder"
        yield fault(FILES, said, "name the folder of the base checkpoint on this machine")


def _tokens(file: Path) -> str:
    count = len(Tokens(file).current)
    return f"{file}: {count} token{'s' if count > 1 else ''}"


def _engines(text: str) -> str:
    try:
        return f"DELTACHAIN_ENGINES names {len(parse_inventory(text))}"
    except ConfigError as exc:
        raise ConfigError(f"DELTACHAIN_ENGINES: {exc.args[0]}", hint=exc.hint) from exc


def _trusted(environment: Mapping[str, str]) -> str:
    trusted = Trust.of_reader(environment=environment).trusted
    keys = trusted.keys if trusted else ()
    return f"trusted keys: {', '.join(key.key_id for key in keys)}"


def _exposed(file: Path) -> Iterator[Finding]:
    try:
        mode = file.stat().st_mode
    except OSError:
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield note(FILES, f"{file} is open to other users of this machine", f"chmod 600 {file}")


def _transport(environment: Mapping[str, str]) -> str:
    files = TlsFiles.of(environment)
    files.context()
    make_client().close()
    cas = files.ca_file or files.ca_folder or "the public ones"
    proxies = sorted(
        name
        for name in environment
        if name.upper() in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") and environment[name]
    )
    through = f"proxies by {', '.join(proxies)}" if proxies else "no proxy"
    client = f", client certificate {files.client_cert}" if files.client_cert else ""
    return f"trusted CAs: {cas}; {through}{client}"


DEADLINE_S: Final = 8.0  # of a request to the store: a diagnosis does not wait

PRESENCE: Final = "presence"
STORE: Final = "store"
WRITES: Final = "writes"
CLOCK: Final = "clock"

LOOKS: Final = 5  # requests of which the median latency is told
RACERS: Final = 8  # concurrent conditional writes of one key
SLOW_S: Final = 2.0  # latency beyond which a request is told to be slow, in seconds
SKEW_S: Final = 60.0  # a fault: ages of heartbeats and times of prunes are compared across machines

_READS: Final = "enough to follow; a publisher needs credentials that may write here"


def examine(
    url: str, role: Role = Role.FOLLOWER, environment: MutableMapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Examine this machine for one role.

    Only a publisher's store and the place for presences are written to, under keys that are removed
    again. Variables with mistakes are removed from the environment once they are reported.
    """
    yield from check_names(environment)
    for name in dict(mistakes(environment)):
        environment.pop(name)
    yield from check_packages(role)
    found = [*check_files(environment), *tried(TRANSPORT, lambda: _transport(environment))]
    yield from found
    url = url or environment.get("DELTACHAIN_URL", "")
    if role is Role.FOLLOWER:
        yield from check_engines(environment)
        yield from check_server(environment)
        yield from check_presence(environment, url)
    if not url:
        yield note(STORE, "no store was examined", "give its URL, or set DELTACHAIN_URL")
    elif any(finding.grade is Grade.FAULT for finding in found):
        yield note(STORE, "no store was examined", "correct the faults above first")
    else:
        yield from _examine_store(url, role, environment)
        if role is Role.FOLLOWER and (draft := read(environment).get("DRAFT_URL")):
            yield from _examine_store(draft, role, environment)


def _examine_store(
    url: str, role: Role, environment: MutableMapping[str, str]
) -> Iterator[Finding]:
    has_deadline = url.lower().startswith(("s3://", "hf://"))
    options: dict[str, Any] = {"deadline_s": DEADLINE_S} if has_deadline else {}
    try:
        store = open_store(url, options, writer=role is Role.PUBLISHER)
        with closing(store):
            yield probe_latency(store)
            if role is Role.PUBLISHER:
                yield from probe_writes(store)
            else:
                yield from check_silence(store, environment)
            yield from check_chain(store, role, environment)
    except errors.DeltaChainError as exc:
        yield failed(STORE, exc)


def check_presence(environment: Mapping[str, str], chain: str) -> Iterator[Finding]:
    url = read(environment).get("PRESENCE_URL", "")
    if not url:
        return
    try:
        if chain:
            check_apart(url, chain)
        store = open_store(url)
    except errors.ConfigError as exc:
        yield failed(PRESENCE, exc)
        return
    key = f"trial-{uuid4().hex}"
    with closing(store):
        try:
            store.put(key, b"trial")
            store.delete(key)
        except errors.DeltaChainError as exc:
            hint = exc.hint or "name a place where this machine may write and delete"
            yield fault(PRESENCE, f"no presence can be written: {exc.args[0]}", hint)
        else:
            every_s = interval_s(store.capabilities)
            said = f"{store.url} takes the presence of a replica, every {every_s:g} s"
            yield ok(PRESENCE, said)


def probe_latency(store: Store) -> Finding:
    times = []
    for _ in range(LOOKS):
        start = time.monotonic()
        store.find(CHAIN_KEY)
        times.append(time.monotonic() - start)
    latency = median(times)
    said = f"{store.url} answers in {latency * 1e3:.1f} ms"
    if latency > SLOW_S:
        return note(STORE, said, "versions arrive late: use a store or a mirror that is closer")
    return ok(STORE, said)


def probe_writes(store: Store, now: Callable[[], float] = time.time) -> Iterator[Finding]:
    name = uuid4().hex
    single, raced = trial_key(f"{name}-single"), trial_key(f"{name}-raced")
    try:
        found = list(_probe_single(store, single, now))
        yield from found
        if all(one.check != WRITES for one in found):  # else it is known not to decide
            yield _probe_race(store, raced)
    except errors.StorePermissionError as exc:
        yield fault(WRITES, f"nothing can be written: {exc.args[0]}", _READS)
    except errors.DeltaChainError as exc:
        yield failed(WRITES, exc)
    finally:
        left = [key for key in (single, raced) if not _removed(store, key)]
    if left:
        keys = " and ".join(left)
        yield note(WRITES, f"{keys} cannot be removed", "allow deletion, or remove them by hand")


def _probe_single(store: Store, key: str, now: Callable[[], float]) -> Iterator[Finding]:
    before = now()
    store.put_if_absent(key, b"first")
    after = now()
    info = store.find(key)
    try:
        store.put_if_absent(key, b"second")
    except errors.AlreadyExistsError:
        pass
    else:
        yield _overwrites(store)
        return
    if store.get(key) != b"first":
        yield fault(
            WRITES,
            f"{store.url} does not return what was written",
            "look for a cache or a proxy before the store",
        )
    if info is None or info.modified is None:
        yield note(CLOCK, f"{store.url} does not tell when an object was written")
    else:
        yield clocks(ahead_s=_distance(info.modified, before - 1.0, after + 1.0))


def compare_clocks(
    store: Store, newest: ObjectInfo | None, now: Callable[[], float] = time.time
) -> Iterator[Finding]:
    """Yield how this machine's clock differs from the store's, which no manifest is ahead of."""
    told = store.clock()
    ahead_s = 0.0 if told is None else _distance(told, now() - 2.0, now() + 1.0)
    if newest is not None and newest.modified is not None and newest.modified > now() + 1.0:
        ahead_s = max(ahead_s, newest.modified - now())
    if ahead_s:
        yield clocks(ahead_s=ahead_s)


def _distance(moment: float, first: float, last: float) -> float:
    """Return how far a moment is after ``last`` or, below 0, before ``first``."""
    return max(0.0, moment - last) or min(0.0, moment - first)


def clocks(*, ahead_s: float) -> Finding:
    if abs(ahead_s) < 1:
        return ok(CLOCK, "this machine's clock agrees with the store's")
    order = "behind" if ahead_s > 0 else "ahead of"
    said = f"this machine's clock is {abs(ahead_s):,.0f} s {order} the store's"
    hint = "set the clock of this machine, by NTP for example"
    return (fault if abs(ahead_s) > SKEW_S else note)(CLOCK, said, hint)


def _probe_race(store: Store, key: str) -> Finding:
    if not store.capabilities.conditional_put:
        return note(
            WRITES,
            f"{store.url} takes writes, and cannot decide between two publishers",
            "start a single publisher; a Hub bucket decides with keys of its S3 gateway",
        )
    start = Barrier(RACERS)

    def race(number: int) -> bool:
        with suppress(Exception):  # without threads for all, those that there are race
            start.wait(5)
        try:
            store.put_if_absent(key, str(number).encode())
        except (errors.AlreadyExistsError, errors.StoreUnavailableError):
            return False
        return True

    with Pool(RACERS) as pool:
        winners = sum(pool.map(race, range(RACERS)))
    if winners != 1:
        return _overwrites(store, f"{winners} of {RACERS} concurrent writers were told to have won")
    return ok(WRITES, f"one of {RACERS} concurrent conditional writes won, as it must")


def _overwrites(store: Store, why: str = "it overwrites objects that are there") -> Finding:
    return fault(
        WRITES,
        f"{store.url} does not keep its promise of conditional writes: {why}",
        "two publishers could both commit a version: use a release of the server that holds "
        "If-None-Match, or another store",
    )


def _removed(store: Store, key: str) -> bool:
    try:
        store.delete(key)
        return store.find(key) is None
    except errors.DeltaChainError:
        return False


CHAIN: Final = "chain"
START: Final = "start"


def check_chain(store: Store, role: Role, environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        if role is Role.PUBLISHER:
            trust = Trust.of_writer(environment=environment)
            refuse_mirror(store, trust)
        else:
            trust = Trust.of_reader(environment=environment)
        chain = Chain.open(store, trust)
        head = require(chain, None)
    except errors.ObjectNotFoundError:
        yield _no_chain(store, role)
        return
    except errors.DeltaChainError as exc:
        yield failed(CHAIN, exc)
        return
    yield _newest(chain, head)
    stored = store.find(manifest_key(head.version))
    yield from _publisher_clock(head, stored)
    if role is Role.FOLLOWER:  # a publisher's writes have told more
        yield from compare_clocks(store, stored)
        yield from _newcomer(chain, head, environment)
    else:
        yield ok(START, f"a publisher continues with version {head.version + 1}")


def check_silence(store: Store, environment: Mapping[str, str]) -> Iterator[Finding]:
    given = read(environment)
    most_s = given.get("MAX_SILENCE_S")
    poll_s = given.get("POLL_S") or store.capabilities.poll_s
    pause_s = between_polls(poll_s).first_s
    if most_s is not None and most_s <= pause_s:
        yield fault(
            START,
            f"DELTACHAIN_MAX_SILENCE_S is {most_s:g}, and a follower of this store polls every "
            f"{pause_s:g} s at most: it would say again and again that it is not ready",
            f"set it to several polls: {max(60, math.ceil(2 * pause_s))}, or poll more often",
        )


def _no_chain(store: Store, role: Role) -> Finding:
    if role is Role.PUBLISHER:
        return ok(START, f"{store.url} has no chain: a publisher makes one, with version 0")
    said = f"{store.url} has no chain: a follower waits until a publisher has made one"
    return note(CHAIN, said, "start the publisher, or correct the URL")


def _newest(chain: Chain, head: Committed) -> Finding:
    manifest = head.manifest
    age = max(0.0, time.time() - manifest.time)
    step = "" if manifest.step is None else f" of step {manifest.step}"
    signed = "" if chain.trust.trusted is None else ", signed by a trusted key"
    return ok(
        CHAIN, f"version {head.version}{step} is the newest, committed {_span(age)} ago{signed}"
    )


def _publisher_clock(head: Committed, stored: ObjectInfo | None) -> Iterator[Finding]:
    """Yield a finding if a manifest is dated after its write, which no copying can cause."""
    told = None if stored is None else stored.modified
    ahead_s = head.manifest.time - (time.time() if told is None else told)
    if ahead_s > SKEW_S:
        yield note(
            CLOCK,
            f"version {head.version} is dated {_span(ahead_s)} after its write to the store: "
            "the clock of its publisher is ahead",
            "set the clock of the publisher: alerts on the age of versions come that much later",
        )


def _newcomer(chain: Chain, head: Committed, environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        plan = plan_present(chain, None, head)
    except errors.DeltaChainError as exc:
        yield failed(START, exc)
        return
    size = f"{plan.nbytes / 1e6:,.1f} MB in {plan.requests} objects"
    yield ok(START, f"a follower that holds nothing fetches {size}")
    yield from _spool(plan, spool_folder(environment))
    if any(edge.kind == "base" for edge in plan.edges) and "BASE" not in read(environment):
        yield note(
            START,
            "the chain begins with a base checkpoint that it does not contain",
            "set DELTACHAIN_BASE, or start the engine from that checkpoint",
        )


def _spool(plan: Plan, spool: Path) -> Iterator[Finding]:
    there = next(path for path in (spool, *spool.parents) if path.exists())
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError:
        yield fault(
            START,
            f"{there}, where objects are kept while they are staged, cannot be written to",
            "name another folder in DELTACHAIN_SPOOL",
        )
        return
    try:
        check_room(there, plan.nbytes)
    except NoRoomError as exc:
        hint = "free some space, or name another folder in DELTACHAIN_SPOOL"
        yield fault(START, f"{there} lacks {exc.missing:,} bytes for the fetched objects", hint)


def check_server(environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        settings = ReplicaSettings.of(environment)
        if settings is None:
            yield note(START, "a server would follow no chain: DELTACHAIN_URL is not set")
            return
        tokens = Tokens(settings.token)
    except errors.DeltaChainError as exc:
        yield failed(START, exc)
        return
    exits = "ends at its start" if settings.strict else "serves what it loaded"
    yield ok(
        START, f"a server follows {redacted_url(settings.subscribe.url)}, and {exits} if it cannot"
    )
    if not settings.follow:
        hint = "set DELTACHAIN_FOLLOW=1 to apply them as they are committed"
        yield note(START, "a server applies new versions only when it is told to", hint)
    if not tokens:
        yield note(
            START,
            "a server without a key of its own answers on the loopback interface alone",
            "set DELTACHAIN_TOKEN or DELTACHAIN_TOKEN_FILE to control it from elsewhere",
        )


def _span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"

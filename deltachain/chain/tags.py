"""Tags: names of versions, such as ``eval-step-4000``.

A tag is a sequence of numbered records, each written once; the newest counts. Moving a tag adds a
record, removing it adds one without a version. A tag counts once its version was seen to be
reachable after the record was written, so that who deletes payloads and read the tags before keeps
what it must, or the tag is taken back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple

import msgspec

from deltachain import errors
from deltachain.chain.chain import Chain, Committed, check_write_access, is_reachable
from deltachain.chain.checks import read_document
from deltachain.chain.heartbeat import check_tags, named, newest_prune, warn_of_unproven
from deltachain.chain.manifests import NONE, newest_number
from deltachain.format.documents import NAME, Document, PruneRecord, Tag
from deltachain.format.keys import TAG_PREFIX, prune_key, tag_key, tag_of
from deltachain.threads import Pool
from deltachain.types import Version

# Steps and times are not decided by the format, so their order is taken as follows. Times grow from
# version to version. Steps grow within an epoch, whose first version may repeat the step of the
# previous one; a trainer that goes back is a new publisher and has a new epoch. A search by time
# reads O(log n) manifests. A search by step reads O(log n) manifests of each epoch, back from the
# head to the newest that has the step: where each version is an epoch of its own, as after pushes,
# all of these versions.


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChoice:
    """Which version is meant: at most one attribute is given; without any, the head.

    Attributes:
        step: Step of the trainer; the newest version of that step is meant.
        at: Time in seconds since 1970; the newest version committed at or before is meant.
    """

    version: Version | None = None
    step: int | None = None
    tag: str = ""
    at: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("version", "step", "at") if getattr(self, name) is not None]
        given += ["tag"] if self.tag else []
        if len(given) > 1:
            raise errors.ConfigError(
                f"{' and '.join(given)} exclude each other: each names a version",
                hint="give one of them",
            )

    @property
    def is_search(self) -> bool:
        return self.step is not None or bool(self.tag) or self.at is not None


def choose(chain: Chain, choice: VersionChoice) -> Committed:
    if choice.tag:
        tag = read(chain, choice.tag)
        if tag is None:
            raise unknown(chain, choice.tag)
        return committed(chain, tag)
    head = chain.head()
    if head is None:
        raise errors.no_version(chain.store.url)
    if choice.version is not None:
        found = chain.find(choice.version)
        if found is None:
            what = f"{chain.store.url} does not have version {choice.version}"
            hint = f"the head is version {head.version}"
            raise errors.ChainError(what, version=choice.version, hint=hint)
        return found
    if choice.step is not None:
        return chain.read(_Search(chain, head).by_step(choice.step))
    if choice.at is not None:
        return chain.read(_Search(chain, head).by_time(choice.at))
    return head


class _Stamp(NamedTuple):
    version: Version
    epoch: int
    step: int | None
    time: float


def _is_older(epoch: int, one: _Stamp) -> bool:
    return one.epoch < epoch


class _Search:
    """Search through the manifests of a chain, each read once."""

    def __init__(self, chain: Chain, head: Committed) -> None:
        self._chain = chain
        self._head = _stamp(head)
        self._read: dict[Version, _Stamp | None] = {head.version: self._head}

    def by_step(self, step: int) -> Version:
        """Find the newest version of a step, epoch by epoch."""
        high: _Stamp | None = self._head
        while high is not None:
            before = self._last(0, high.version - 1, partial(_is_older, high.epoch))
            low = self._first(before.version + 1 if before else 0, high.version) or high
            found = self._last(
                low.version + 1, high.version, lambda one: _by(one)[0] <= step, stepped=True
            )
            for one in (high, found, low):
                if one is not None and one.step == step:
                    return one.version
            high = before
        raise errors.ChainError(
            f"{self._chain.store.url} has no version of step {step}", hint=self._near(step)
        )

    def by_time(self, at: float) -> Version:
        found = self._last(0, self._head.version, lambda one: one.time <= at)
        if found is None:
            oldest = self._first(0, self._head.version) or self._head
            raise errors.ChainError(
                f"{self._chain.store.url} has no version committed at or before {_iso(at)}",
                hint=f"version {oldest.version} is the oldest, of {_iso(oldest.time)}",
            )
        return found.version

    def _last(
        self, low: Version, high: Version, holds: Callable[[_Stamp], bool], *, stepped: bool = False
    ) -> _Stamp | None:
        """Bisect for the last version of which something holds that holds up to some version."""
        found = None
        while low <= high:
            middle = (low + high) // 2
            stamp = self._first(middle, high, stepped=stepped)
            if stamp is not None and holds(stamp):
                found, low = stamp, stamp.version + 1
            else:
                high = middle - 1
        return found

    def _first(self, first: Version, last: Version, *, stepped: bool = False) -> _Stamp | None:
        """Return the first of some versions that exists, and has a step if so wanted."""
        for version in range(first, last + 1):
            stamp = self._stamp(version)
            if stamp is not None and not (stepped and stamp.step is None):
                return stamp
        return None

    def _stamp(self, version: Version) -> _Stamp | None:
        if version not in self._read:
            found = self._chain.find(version)
            self._read[version] = None if found is None else _stamp(found)
        return self._read[version]

    def _near(self, step: int) -> str:
        met = [s for s in self._read.values() if s is not None and s.step is not None]
        below = max((s for s in met if s.step is not None and s.step < step), default=None, key=_by)
        above = min((s for s in met if s.step is not None and s.step > step), default=None, key=_by)
        near = [f"{s.step} (version {s.version})" for s in (below, above) if s is not None]
        return f"near it are the steps {' and '.join(near)}" if near else "no version has a step"


def _by(stamp: _Stamp) -> tuple[int, Version]:
    return stamp.step or 0, stamp.version


def _stamp(committed: Committed) -> _Stamp:
    manifest = committed.manifest
    return _Stamp(manifest.version, manifest.epoch, manifest.step, manifest.time)


def _iso(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):  # the publisher's clock may be wrong
        return f"{seconds} s"


READS: Final = 16  # records read at a time
TRIES: Final = 16  # numbers tried for a record while others write records of the same tag


def read(chain: Chain, name: str) -> Tag | None:
    """Read a tag; ``None`` if it does not exist or was removed.

    A warning is logged where no recent heartbeat proves that the record is the newest.
    """
    heartbeat = named(chain)
    record = _newest(chain, check_name(name))
    check_tags(chain, heartbeat, {name: record.number if record else NONE})
    if record is not None:
        warn_of_unproven(chain, heartbeat, f"record {record.number} of tag {name!r} is")
    return _standing(record)


def shown(chain: Chain, name: str) -> Tag | None:
    """Read a tag that may be older than the heartbeat names, for who sets or removes it."""
    return _standing(_newest(chain, check_name(name)))


def committed(chain: Chain, tag: Tag) -> Committed:
    """Read the version of a tag, and check that it is the one that was tagged."""
    found = None if tag.version is None else chain.find(tag.version)
    if found is None:
        raise errors.StoreWentBackError(
            f"tag {tag.name!r} names version {tag.version}, which is not in {chain.store.url}",
            version=tag.version,
        )
    if found.digest != tag.manifest:
        raise errors.ForkedChainError(
            f"tag {tag.name!r} names version {tag.version} with manifest {tag.manifest[:16]}, "
            f"{chain.store.url} has another one there, {found.digest[:16]}",
            version=tag.version,
            hint="the store was restored from a backup and other versions were committed since; "
            "set the tag again, or remove it",
        )
    return found


def read_all(chain: Chain) -> tuple[Tag, ...]:
    """List the tags that stand for a version, by name."""
    return tuple(record for record in newest_records(chain) if record.version is not None)


def newest_records(chain: Chain) -> tuple[Tag, ...]:
    """Read the newest record of every tag, of removed ones too, by name."""
    heartbeat = named(chain)
    listed = numbers(chain)
    with Pool(READS) as pool:
        newest = pool.map(lambda one: _newest(chain, one[0], known=one[1]), sorted(listed.items()))
        records = tuple(record for record in newest if record is not None)
    known = dict.fromkeys((heartbeat and heartbeat.tags) or (), NONE)
    check_tags(chain, heartbeat, known | {record.name: record.number for record in records})
    return records


def numbers(chain: Chain) -> dict[str, int]:
    """List the number of the newest record of every tag, by name; no record is read."""
    listed: dict[str, int] = {}
    for info in chain.store.list(TAG_PREFIX):
        if (found := tag_of(info.key)) is not None:
            name, number = found
            listed[name] = max(number, listed.get(name, NONE))
    return listed


def is_accepted(chain: Chain, name: str, number: int) -> bool:
    """Return whether a record is there that readers with the trusted keys of this chain accept."""
    try:
        _record(chain, name, number)
    except (errors.FormatError, errors.ObjectNotFoundError):
        return False
    return True


def put_after(chain: Chain, record: Tag) -> bool:
    """Write a record again under the next number; return whether no other came there first."""
    check_write_access(chain)
    return _put(chain, msgspec.structs.replace(record, number=record.number + 1))


def sign_again(chain: Chain) -> tuple[str, ...]:
    """Write tags and the newest prune record again that this process's key did not sign.

    Each is written under its next number. A record that another process replaces at the same time
    is left to it: call again. Edge records keep their signatures, since they are written once.
    """
    check_write_access(chain)
    if chain.trust.key is None:
        raise errors.ConfigError("no signing key is given", hint="set DELTACHAIN_SIGNING_KEY")
    written = [
        tag_key(tag.name, tag.number + 1)
        for tag in newest_records(chain)
        if not _is_own(chain, tag_key(tag.name, tag.number), Tag) and put_after(chain, tag)
    ]
    record = newest_prune(chain)
    if record is not None and not _is_own(chain, prune_key(record.number), PruneRecord):
        key = prune_key(record.number + 1)
        again = msgspec.structs.replace(record, number=record.number + 1)
        try:
            chain.store.put_if_absent(key, chain.trust.seal(again, chain.identity.chain))
        except errors.AlreadyExistsError:
            return tuple(written)
        written.append(key)
    return tuple(written)


def _is_own(chain: Chain, key: str, kind: type[Document]) -> bool:
    signers = chain.trust.signers(chain.store.get(key), kind, chain.identity.chain)
    own = chain.trust.key
    return own is not None and own.public.key_id in signers


def set_(chain: Chain, name: str, target: Committed, *, time: float) -> Tag:
    """Make a name stand for a version; return the record that says so.

    Two callers at once both succeed, one after the other. Nothing is written if the tag already
    stands for the version.
    """
    check_name(name)
    check_write_access(chain)
    if not _is_kept(chain, target):
        raise _unreachable(chain, name, target, "the tag was not set")
    before, beyond = _newest(chain, name), _named(chain, name)
    here = (target.version, target.digest)
    if before and before.number >= beyond and (before.version, before.manifest) == here:
        return before
    record = partial(
        Tag,
        chain=chain.identity.chain,
        name=name,
        version=target.version,
        state=target.manifest.state,
        manifest=target.digest,
        time=time,
    )
    after = before.number if before else NONE
    tag = _put_next(chain, name, record, after=after, beyond=beyond)
    if not _is_kept(chain, target):
        _put(chain, _removal(chain, name, time, tag.number + 1))  # unless another one is newer
        raise _unreachable(chain, name, target, "the tag was removed")
    return tag


def remove(chain: Chain, name: str, *, time: float) -> Tag:
    """Remove a tag; return the record that stood for a version until now."""
    check_write_access(chain)
    tag = shown(chain, name)
    if tag is None:
        raise unknown(chain, name)
    removal, beyond = partial(_removal, chain, name, time), _named(chain, name)
    _put_next(chain, name, removal, after=tag.number, beyond=beyond)
    return tag


def check_name(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise errors.ConfigError(
            f"{name[:140]!r} is not a name of a tag",
            hint="1 to 128 characters from A-Z a-z 0-9 . _ - that do not begin with a dot, such as "
            "eval-step-4000",
        )
    return name


def unknown(chain: Chain, name: str) -> errors.ChainError:
    names = [tag.name for tag in read_all(chain)]
    some = ", ".join(names[:8]) + (" and others" if names[8:] else "")
    hint = f"tags are {some}" if names else "no tag is set; `deltachain tag URL NAME` sets one"
    return errors.ChainError(f"{chain.store.url} has no tag {name!r}", hint=hint)


def _standing(record: Tag | None) -> Tag | None:
    """Return a record that stands for a version; ``None`` for one that removes the tag."""
    return record if record is not None and record.version is not None else None


def _is_kept(chain: Chain, target: Committed) -> bool:
    """Return whether a version can be rebuilt over edges that nobody may delete."""
    newest_prune(chain)
    return is_reachable(chain, target.version)


def _unreachable(
    chain: Chain, name: str, target: Committed, outcome: str
) -> errors.BrokenChainError:
    return errors.BrokenChainError(
        f"version {target.version} cannot be rebuilt from {chain.store.url}: payloads of every way "
        f"to it are gone, or pruned and may be deleted at any moment; {outcome} ({name!r})",
        version=target.version,
        hint="tag a later version; `deltachain pull` may still get this one, for `deltachain push`",
    )


def _removal(chain: Chain, name: str, time: float, number: int) -> Tag:
    return Tag(
        chain=chain.identity.chain,
        name=name,
        number=number,
        version=None,
        state="",
        manifest="",
        time=time,
    )


def _newest(chain: Chain, name: str, *, known: int = NONE) -> Tag | None:
    number = newest_number(chain.store, partial(tag_key, name), known=known)
    return None if number == NONE else _record(chain, name, number)


def _record(chain: Chain, name: str, number: int) -> Tag:
    key = tag_key(name, number)
    record, _ = read_document(chain.store, key, Tag, chain=chain.identity.chain, trust=chain.trust)
    if (record.name, record.number) != (name, number):
        raise errors.MalformedError(
            f"{key}: is number {record.number} of tag {record.name!r}", key=key
        )
    return record


def _named(chain: Chain, name: str) -> int:
    """Return the number of a tag's newest record by the heartbeat; -1 if it names none."""
    heartbeat = named(chain)
    return ((heartbeat and heartbeat.tags) or {}).get(name, NONE)


def _put_next(
    chain: Chain, name: str, record: Callable[..., Tag], *, after: int, beyond: int
) -> Tag:
    """Write a record under the first free number after ``after``.

    Where the heartbeat names a later record, which the store lost or withholds, the record is also
    written under every number up to the one after that: numbers have no gaps.
    """
    for number in range(after + 1, max(after, beyond) + 1 + TRIES):
        made = record(number=number)
        if _put(chain, made) and number > beyond:
            return made
    raise errors.ChainError(
        f"tag {name!r} was set by others {TRIES} times while it was to be set here",
        hint="see that one process sets a tag, and try again",
    )


def _put(chain: Chain, record: Tag) -> bool:
    """Write a record; return whether it is the one under its number now."""
    store, key = chain.store, tag_key(record.name, record.number)
    data = chain.trust.seal(record, chain.identity.chain)
    try:
        store.put_if_absent(key, data)
    except errors.AlreadyExistsError:
        return store.get(key) == data  # an own earlier attempt may have written it
    except errors.StoreUnavailableError:
        if store.find(key) is None:
            raise
        return store.get(key) == data
    return store.capabilities.conditional_put or store.get(key) == data

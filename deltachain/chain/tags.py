"""Tags: names of versions, such as ``eval-step-4000``.

A tag is a sequence of numbered records, each written once; the newest counts. Moving a tag adds a
record, removing it adds one without a version. A tag counts once its version was seen to be
reachable after the record was written, so that who deletes payloads and read the tags before keeps
what it must, or the tag is taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.checks import read_document
from deltachain.chain.heartbeat import check_tags, named, newest_prune, warn_of_unproven
from deltachain.chain.lookup import NONE, newest_number
from deltachain.chain.reachable import check_write_access, is_reachable
from deltachain.errors import (
    AlreadyExistsError,
    BrokenChainError,
    ChainError,
    ConfigError,
    ForkedChainError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
    StoreUnavailableError,
    StoreWentBackError,
)
from deltachain.format.documents import NAME, Tag
from deltachain.format.keys import TAG_PREFIX, tag_key, tag_of
from deltachain.threads import Pool

READS: Final = 16
"""Records read at a time."""

TRIES: Final = 16
"""Numbers tried for a record while others write records of the same tag."""


def read(chain: Chain, name: str) -> Tag | None:
    """Read a tag; ``None`` if it does not exist or was removed.

    A warning is logged where no recent heartbeat proves that the record is the newest.

    Raises:
        ConfigError: No tag can have that name.
        StaleChainError: The chain is signed, and the store shows an older record than the heartbeat
            names, or the heartbeat is older than this process allows.
        FormatError: The newest record is damaged, or of another tag.
    """
    heartbeat = named(chain)
    record = _newest(chain, check_name(name))
    check_tags(chain, heartbeat, {name: record.number if record else NONE})
    if record is not None:
        warn_of_unproven(chain, heartbeat, f"record {record.number} of tag {name!r} is")
    return _standing(record)


def shown(chain: Chain, name: str) -> Tag | None:
    """Read a tag that may be older than the heartbeat names, for who sets or removes it.

    Raises:
        ConfigError: No tag can have that name.
        FormatError: The newest record is damaged, or of another tag.
    """
    return _standing(_newest(chain, check_name(name)))


def committed(chain: Chain, tag: Tag) -> Committed:
    """Read the version of a tag, and check that it is the one that was tagged.

    Raises:
        StoreWentBackError: The version is no longer in the store.
        ForkedChainError: The store has another history now.
    """
    found = None if tag.version is None else chain.find(tag.version)
    if found is None:
        raise StoreWentBackError(
            f"tag {tag.name!r} names version {tag.version}, which is not in {chain.store.url}",
            version=tag.version,
        )
    if found.digest != tag.manifest:
        raise ForkedChainError(
            f"tag {tag.name!r} names version {tag.version} with manifest {tag.manifest[:16]}, "
            f"{chain.store.url} has another one there, {found.digest[:16]}",
            version=tag.version,
            hint="the store was restored from a backup and other versions were committed since; "
            "set the tag again, or remove it",
        )
    return found


def read_all(chain: Chain) -> tuple[Tag, ...]:
    """List the tags that stand for a version, by name.

    Raises:
        StaleChainError: As :func:`read`, of any tag.
        FormatError: A newest record is damaged, or of another tag.
    """
    return tuple(record for record in newest_records(chain) if record.version is not None)


def newest_records(chain: Chain) -> tuple[Tag, ...]:
    """Read the newest record of every tag, of removed ones too, by name.

    Raises:
        StaleChainError: As :func:`read`, of any tag.
        FormatError: A record is damaged, or of another tag.
    """
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
    except (FormatError, ObjectNotFoundError):
        return False
    return True


def put_after(chain: Chain, record: Tag) -> bool:
    """Write a record again under the next number; return whether no other came there first."""
    check_write_access(chain)
    return _put(chain, msgspec.structs.replace(record, number=record.number + 1))


def set_(chain: Chain, name: str, target: Committed, *, time: float) -> Tag:
    """Make a name stand for a version; return the record that says so.

    Two callers at once both succeed, one after the other. Nothing is written if the tag already
    stands for the version.

    Args:
        chain: The chain.
        name: Name of the tag.
        target: The version.
        time: Now, in seconds since 1970.

    Raises:
        ConfigError: No tag can have that name, the store is a mirror, or the chain is signed and
            there is no signing key.
        BrokenChainError: The version cannot be rebuilt from the store, or only over pruned edges:
            the tag is as it was, or removed if that came to light only after the record was
            written.
        FormatError: The newest prune record is damaged.
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
    """Remove a tag; return the record that stood for a version until now.

    Args:
        chain: The chain.
        name: Name of the tag.
        time: Now, in seconds since 1970.

    Raises:
        ConfigError: No tag can have that name, the store is a mirror, or the chain is signed and
            there is no signing key.
        ChainError: There is no such tag.
    """
    check_write_access(chain)
    tag = shown(chain, name)
    if tag is None:
        raise unknown(chain, name)
    removal, beyond = partial(_removal, chain, name, time), _named(chain, name)
    _put_next(chain, name, removal, after=tag.number, beyond=beyond)
    return tag


def check_name(name: str) -> str:
    """Return the name of a tag.

    Raises:
        ConfigError: No tag can have that name.
    """
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name[:140]!r} is not a name of a tag",
            hint="1 to 128 characters from A-Z a-z 0-9 . _ - that do not begin with a dot, such as "
            "eval-step-4000",
        )
    return name


def unknown(chain: Chain, name: str) -> ChainError:
    """Build the error for a tag that does not exist; its hint names some that do."""
    names = [tag.name for tag in read_all(chain)]
    some = ", ".join(names[:8]) + (" and others" if names[8:] else "")
    hint = f"tags are {some}" if names else "no tag is set; `deltachain tag URL NAME` sets one"
    return ChainError(f"{chain.store.url} has no tag {name!r}", hint=hint)


def _standing(record: Tag | None) -> Tag | None:
    """Return a record that stands for a version; ``None`` for one that removes the tag."""
    return record if record is not None and record.version is not None else None


def _is_kept(chain: Chain, target: Committed) -> bool:
    """Return whether a version can be rebuilt over edges that nobody may delete.

    Raises:
        FormatError: The newest prune record, which says so, is damaged.
        StaleChainError: The store shows an older one than its heartbeat names.
    """
    newest_prune(chain)
    return is_reachable(chain, target.version)


def _unreachable(chain: Chain, name: str, target: Committed, outcome: str) -> BrokenChainError:
    return BrokenChainError(
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
    """Read the newest record of a tag; ``None`` if there is none."""
    number = newest_number(chain.store, partial(tag_key, name), known=known)
    return None if number == NONE else _record(chain, name, number)


def _record(chain: Chain, name: str, number: int) -> Tag:
    """Read one record; once more if it is unreadable."""
    key = tag_key(name, number)
    record, _ = read_document(chain.store, key, Tag, chain=chain.identity.chain, trust=chain.trust)
    if (record.name, record.number) != (name, number):
        raise MalformedError(f"{key}: is number {record.number} of tag {record.name!r}", key=key)
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

    Raises:
        ChainError: Other writers took every number that was tried.
    """
    for number in range(after + 1, max(after, beyond) + 1 + TRIES):
        made = record(number=number)
        if _put(chain, made) and number > beyond:
            return made
    raise ChainError(
        f"tag {name!r} was set by others {TRIES} times while it was to be set here",
        hint="see that one process sets a tag, and try again",
    )


def _put(chain: Chain, record: Tag) -> bool:
    """Write a record; return whether it is the one under its number now."""
    store, key = chain.store, tag_key(record.name, record.number)
    data = chain.trust.seal(record, chain.identity.chain)
    try:
        store.put_if_absent(key, data)
    except AlreadyExistsError:
        return store.get(key) == data  # an own earlier attempt may have written it
    except StoreUnavailableError:
        if store.find(key) is None:
            raise
        return store.get(key) == data
    return store.capabilities.conditional_put or store.get(key) == data

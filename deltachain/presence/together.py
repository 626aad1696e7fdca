"""Replicas that share only a store and stay within one version of each other.

Each tells the version that it holds in an object beside the presences. None takes a version before
all others hold the one before it, so while one is away, or behind, the others wait.
"""

import logging
import re
from collections.abc import Mapping
from typing import Final

from deltachain.errors import ControlPlaneError, DeltaChainError
from deltachain.store import open_store
from deltachain.types import Version

_HELD: Final = re.compile(rb"[0-9]{1,16}")

logger = logging.getLogger(__name__)


def newest_for(member: str, held: Mapping[str, Version], count: int, group: str) -> Version:
    """Return the newest version that a member of a group of ``count`` replicas may take.

    Args:
        member: Name of the replica.
        held: The version that each replica has told, by name.
        count: Number of replicas in the group.
        group: Name of the group.

    Raises:
        ControlPlaneError: Replicas are absent, or there are more than the group has.
    """
    others = {name: version for name, version in held.items() if name != member}
    if len(others) > count - 1:
        raise ControlPlaneError(
            f"group {group!r} has {count} replicas, and in addition to this one "
            f"{', '.join(others)} told their versions",
            hint=f"delete the objects together/{group}/... of those that are gone",
        )
    if len(others) < count - 1:
        raise ControlPlaneError(
            f"{len(others) + 1} of {count} replicas of group {group!r} told their versions",
            hint="start the others with the same DELTACHAIN_TOGETHER and DELTACHAIN_PRESENCE_URL",
        )
    return min(others.values()) + 1


class Together:
    """This replica's part in its group; for one thread at a time.

    Args:
        url: Store of the presences.
        group: Name and number of replicas, above 1.
        member: Name of this replica, the same after a restart.
    """

    def __init__(self, url: str, group: tuple[str, int], member: str) -> None:
        self._name, self._count = group
        self._member = member
        self._prefix = f"together/{self._name}/"
        self._store = open_store(url)
        self._told: Version | None = None

    def tell(self, version: Version) -> None:
        """Tell the others which version this replica holds; an error is logged, and tried again."""
        if version == self._told:
            return
        self._told = None
        try:
            self._store.put(self._prefix + self._member, str(version).encode())
        except DeltaChainError as exc:
            logger.warning("group %s is not told of version %d: %s", self._name, version, exc)
        else:
            self._told = version

    def newest(self) -> Version:
        """Return the newest version that this replica may take; see :func:`newest_for`."""
        held = {}
        for info in self._store.list(self._prefix):
            data = self._store.get(info.key)
            if _HELD.fullmatch(data) is None:
                raise ControlPlaneError(f"{info.key} tells no version", hint="delete it")
            held[info.key.removeprefix(self._prefix)] = int(data)
        return newest_for(self._member, held, self._count, self._name)

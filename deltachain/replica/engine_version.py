"""The versions of an engine that were tested with this deltachain."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltachain.errors import EngineVersionError


@dataclass(frozen=True, slots=True)
class VersionRange:
    """A range of versions: from ``first`` up to, not including, ``beyond``.

    Attributes:
        engine: Name of the engine; in lower case, the name of its package.
        first: First tested version; its length is the number of components that are compared.
        beyond: First version after the range, of the same length.
    """

    engine: str
    first: tuple[int, ...]
    beyond: tuple[int, ...]

    def check(self, found: str) -> str:
        """Return the given version, if it is in the range.

        Raises:
            EngineVersionError: The version is outside the range.
        """
        pattern = r"\.".join([r"(\d+)"] * len(self.first))
        match = re.match(pattern, found)
        version = tuple(map(int, match.groups())) if match else ()
        if not self.first <= version < self.beyond:
            first, beyond = (".".join(map(str, end)) for end in (self.first, self.beyond))
            raise EngineVersionError(
                f"{self.engine} {found} was not tested with this deltachain: "
                f"{first} up to, not including, {beyond} was",
                hint=f'pip install "{self.engine.lower()}>={first},<{beyond}", '
                "or another deltachain",
            )
        return found

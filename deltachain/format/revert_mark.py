"""Mark of a manifest that goes back: the version whose state it has again (FORMAT.md 2)."""

from __future__ import annotations

from typing import Any, Final

from deltachain.format.documents import Manifest
from deltachain.types import Version

_FIELD: Final = "deltachain.reverted_to"


def revert_mark(version: Version) -> dict[str, Any]:
    """Return the ``ext`` of a manifest that goes back to a version."""
    return {_FIELD: version}


def reverted_to(manifest: Manifest) -> Version | None:
    """Return the version that a manifest goes back to; ``None`` if it has no valid mark."""
    found = manifest.ext.get(_FIELD)
    if not isinstance(found, int) or isinstance(found, bool):
        return None
    return found if 0 <= found < manifest.version else None

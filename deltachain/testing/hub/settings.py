"""What an emulated Hub is told: who may do what, and how often."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

WRITE_TOKEN: Final = "hf_emulated_write"  # noqa: S105
READ_TOKEN: Final = "hf_emulated_read"  # noqa: S105
S3_KEY: Final = "HFAKEMULATED"
S3_SECRET: Final = "emulated"  # noqa: S105

_FILE: Final = "settings.json"


@dataclass(frozen=True, slots=True)
class Settings:
    """How one Hub behaves. The limits are those of a free account.

    Attributes:
        tokens: What each user access token may do: ``write`` or ``read``.
        s3_keys: Access key ids of the S3 gateway.
        calls: Requests to the API that one token has in each window.
        resolver_calls: Requests to ``resolve`` that one token has in each window.
        window_s: Length of a window.
        page: Entries on one page of a listing, and paths in one look-up.
        xet_token_s: How long a token for the CAS is good.
    """

    tokens: dict[str, str] = field(
        default_factory=lambda: {WRITE_TOKEN: "write", READ_TOKEN: "read"}
    )
    s3_keys: list[str] = field(default_factory=lambda: [S3_KEY])
    calls: int = 1000
    resolver_calls: int = 5000
    window_s: float = 300.0
    page: int = 1000
    xet_token_s: float = 3600.0

    @classmethod
    def load(cls, folder: Path) -> Settings:
        """Those that were saved in a folder, else the defaults."""
        try:
            saved = (folder / _FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return cls()
        return cls(**json.loads(saved))

    def changed(self, changes: dict[str, Any]) -> Settings:
        """The same with some of them changed."""
        return replace(self, **changes)

    def save(self, folder: Path) -> None:
        """Keep them for the next start."""
        temporary = folder / f"{_FILE}.tmp"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(folder / _FILE)

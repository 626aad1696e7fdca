"""Settings of the emulated Hub: tokens and rate limits."""

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
    """Settings of a Hub; the default limits are those of a free account.

    Attributes:
        tokens: Right of each user access token: ``write`` or ``read``.
        s3_keys: Access key ids of the S3 gateway.
        calls: API requests of a token in each window.
        resolver_calls: Requests to ``resolve`` of a token in each window.
        window_s: Length of a window, in seconds.
        page: Entries on a page of a listing, and paths in a look-up.
        xet_token_s: Validity of a CAS token, in seconds.
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
        try:
            saved = (folder / _FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return cls()
        return cls(**json.loads(saved))

    def changed(self, changes: dict[str, Any]) -> Settings:
        return replace(self, **changes)

    def save(self, folder: Path) -> None:
        temporary = folder / f"{_FILE}.tmp"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(folder / _FILE)

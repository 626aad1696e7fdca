"""Settings of a publisher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from deltachain.codec import ENCODINGS
from deltachain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    """Settings of a :class:`Publisher`; the defaults suit most runs.

    Raises:
        ConfigError: A value is none of those allowed.

    Example:
        >>> config = deltachain.PublishConfig(url=new_url, encoding="overwrite")
        >>> publisher = deltachain.Publisher(config)
    """

    url: str
    """Where the chain lies: a folder, or a URL that begins with ``s3://``, ``hf://buckets/``,
    ``file:///``, ``memory://``, ``gs://``, ``az://`` or of another scheme of fsspec."""

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Options of the library behind the store, beyond the URL and the environment."""

    encoding: str = "step"
    """How deltas are written: ``step`` is the smallest, ``overwrite`` carries new bits instead of
    steps, ``raw`` opens in any safetensors reader; or an encoding of an installed package."""

    dtype: str | None = None
    """Wire dtype of floating point weights, as safetensors names it (``BF16``). Not given: each
    weight's dtype in the checkpoint that the model was loaded from, else its own."""

    base: Path | None = None
    """Folder of a checkpoint that followers also have. Version 0 then refers to it and uploads
    nothing; the model must hold exactly its bits."""

    assets: Path | None = None
    """Folder whose configuration and tokenizer files travel with the chain, so that ``pull`` makes
    a checkpoint that loads. Not given: files that the model and tokenizer write."""

    trust_remote_code: bool = False
    """Whether those files may name code in a repository (``auto_map``: ``repo--modeling.Class``),
    code that loading a follower's folder then runs. Not given: such entries are removed, with a
    warning."""

    anchor_factor: float = 3.0
    """An anchor is added when a newcomer's cheapest plan costs more than this many anchors. At 1 %
    density an anchor then comes every few hundred versions, and costs about half their deltas."""

    when_busy: Literal["cover", "wait"] = "cover"
    """What ``publish`` does while a version is in flight: leave the change to the next call, or
    wait for it."""

    on_error: Literal["raise", "warn"] = "raise"
    """Whether a failed publish stops training at the next call, or is logged and made up for by
    the next version."""

    deadline_s: float = 300.0
    """Seconds that rank 0 waits for the others, in ``publish`` or for their parts of a version;
    then nothing is committed, and ``on_error`` applies. The others wait three times as long for
    rank 0: it may itself wait for one of them, and then for the store."""

    part_nbytes: int = 512 << 20
    """Most bytes of changes that go into one object before compression."""

    metadata: dict[str, str] = field(default_factory=dict)
    """Your own metadata, written into every manifest."""

    @classmethod
    def at(cls, url: str, config: PublishConfig | None, **settings: Any) -> PublishConfig:  # noqa: ANN401 - fields
        """Settings for a URL.

        Args:
            url: Where the chain lies; replaces the one in ``config``.
            config: All settings at once, if given.
            settings: Single settings, by the names of the fields.
        """
        if config is None:
            return cls(url=url, **settings)
        return replace(config, url=url, **settings)

    def __post_init__(self) -> None:
        ENCODINGS.chosen(self.encoding)
        allowed = {
            "when_busy": ("cover", "wait"),
            "on_error": ("raise", "warn"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {values}")
        if self.anchor_factor <= 0 or self.part_nbytes <= 0 or self.deadline_s <= 0:
            raise ConfigError("anchor_factor, part_nbytes and deadline_s must be positive")

"""Settings of a publisher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from deltachain.codec import ENCODINGS
from deltachain.errors import ConfigError
from deltachain.publish.quantise.settings import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    """Settings of a :class:`Publisher`; the defaults suit most runs.

    Raises:
        ConfigError: A value is not allowed.

    Example:
        >>> config = deltachain.PublishConfig(url=new_url, encoding="overwrite")
        >>> publisher = deltachain.Publisher(config)
    """

    url: str
    """Location of the chain: a folder, or a URL that begins with ``s3://``, ``hf://buckets/``,
    ``file:///``, ``memory://``, ``gs://``, ``az://`` or another scheme of fsspec."""

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Options of the store's library, beyond the URL and the environment."""

    encoding: str = "step"
    """Encoding of deltas: ``step`` is the default; ``overwrite`` stores new bits instead of steps;
    ``raw`` opens in any safetensors reader; ``max`` takes a quarter less than ``step`` at 1 % and a
    third less at 0.1 %, for slow links; or an encoding of an installed package.

    ``max`` reads and writes with the old bits of all elements. It takes several times as long to
    decode; readers of earlier releases leave it out; engines with weights on a device refuse it, as
    does a rank whose share cuts a tile. Shares of 2, 4 or 8 parts of the rows or columns cut none,
    if each tile has 2**18 bytes of weights. A trainer's rank without consecutive elements of a
    tensor stores ``step`` for it."""

    dtype: str | None = None
    """Wire dtype of floating point weights, as safetensors names it (``BF16``). By default, each
    weight's dtype in the checkpoint that the model was loaded from, else its own."""

    quantization: str | Quantization | None = None
    """Recipe that quantises the weights of linear layers and experts before they are published, by
    name (``fp8-block``, ``fp8-block-ue8m0``, ``fp8-row``, ``fp8-tensor``, ``int8-row``), or with
    the layers to leave. The chain then has a quantised checkpoint, of what ``dtype`` says; the
    model keeps its weights."""

    base: Path | None = None
    """Folder of a checkpoint that followers also have. Version 0 then refers to it and uploads
    nothing; the model must have exactly its bits."""

    assets: Path | None = None
    """Folder of configuration and tokenizer files to store with the chain, so that ``pull`` writes
    a loadable checkpoint. By default, files written by the model and tokenizer."""

    trust_remote_code: bool = False
    """Whether those files may refer to code in a repository (``auto_map``:
    ``repo--modeling.Class``), which runs when a follower's folder is loaded. By default, such
    entries are removed, with a warning."""

    snapshot: Literal["host", "device"] | None = None
    """Memory of the last published bits of weights on a device: pinned on the host, from where they
    are copied to the device for each diff, or on the device. By default the device if that leaves
    half of its memory free, and room for an optimizer's first step; which one is logged. Weights on
    the host are compared in place."""

    anchor_factor: float = 3.0
    """Cost of a newcomer's cheapest plan, in anchors, above which another anchor is added. At 1 %
    density, an anchor is added every few hundred versions and costs about half their deltas."""

    anchor_memory: float = 0.5
    """Memory of a rank for old bits while an anchor is on its way, as a share of its weights' size.
    Later versions are published meanwhile; the old bits of each (10 bytes a change in bf16) are
    kept until the anchor has passed their tensor. The version that exceeds this share stays in
    flight until the anchor has landed."""

    when_busy: Literal["cover", "wait"] = "cover"
    """Behaviour of ``publish`` while a version is in flight: leave the changes to the next call, or
    wait for that version."""

    on_error: Literal["raise", "warn"] = "raise"
    """Effect of a failed publish: an error at the next call, or a log entry, with the changes
    covered by the next version."""

    deadline_s: float = 300.0
    """Timeout of rank 0 for the other ranks, in seconds, in ``publish`` and for their parts of a
    version; then nothing is committed, and ``on_error`` applies. Other ranks wait three times as
    long for rank 0, which may itself wait for one of them and then for the store."""

    part_nbytes: int = 512 << 20
    """Largest size of changes in one object before compression, in bytes."""

    metadata: dict[str, str] = field(default_factory=dict)
    """User metadata, written into every manifest."""

    @classmethod
    def at(cls, url: str, config: PublishConfig | None, **settings: Any) -> PublishConfig:  # noqa: ANN401 - fields
        """Return settings for a URL.

        Args:
            url: Location of the chain; replaces the one in ``config``.
            config: All settings, if given.
            settings: Single settings, by field name.
        """
        if config is None:
            return cls(url=url, **settings)
        return replace(config, url=url, **settings)

    def __post_init__(self) -> None:
        ENCODINGS.chosen(self.encoding)
        Quantization.chosen(self.quantization)
        if self.quantization is not None and self.base is not None:
            raise ConfigError(
                "base and quantization exclude each other: a base has the bits of version 0",
                hint="give the folder as assets, and leave out base",
            )
        allowed = {
            "when_busy": ("cover", "wait"),
            "on_error": ("raise", "warn"),
        }
        if self.snapshot not in ("host", "device", None):
            raise ConfigError(f"snapshot={self.snapshot!r}: expected 'host', 'device' or None")
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {values}")
        if self.anchor_memory < 0:
            raise ConfigError(f"anchor_memory={self.anchor_memory!r}: must not be negative")
        if self.anchor_factor <= 0 or self.part_nbytes <= 0 or self.deadline_s <= 0:
            raise ConfigError("anchor_factor, part_nbytes and deadline_s must be positive")

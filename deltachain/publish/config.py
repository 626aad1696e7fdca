"""Settings of a publisher."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from deltachain.chain.anchor_rule import ANCHOR_FACTOR
from deltachain.codec import ENCODINGS
from deltachain.errors import ConfigError
from deltachain.maintain import KeepRule
from deltachain.metrics import parse_address
from deltachain.publish.quantise.settings import Quantization
from deltachain.setting_types import AtLeastOne, NotNegative, Positive, check_kinds
from deltachain.store import Location, location_of
from deltachain.types import WIRE_DTYPES

_FLOATS: Final = tuple(name for name in WIRE_DTYPES if name.startswith(("F", "BF")))

AS_IN_MODEL: Final = "model"
"""Value of ``PublishConfig.dtype`` for the dtypes of the model, whatever its checkpoint has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    """Settings of a :class:`Publisher`; the defaults suit most runs.

    Ranks of a trainer must have the same ``url``, ``encoding``, ``dtype``, ``quantization``,
    ``anchor_format``, ``when_busy``, ``on_error`` and ``deadline_s``, and all a ``base`` or none;
    else no rank attaches. The other settings are rank 0's, or each rank's own.

    Raises:
        ConfigError: A value is of another type than its field, or not allowed.

    Examples:
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
    decode; readers of earlier releases leave it out. So do engines of which a rank's share cuts a
    tile, or that leave some matrices of a layer unused: they take anchors and other edges, and
    refuse what has none. Matrices are divided so that 2 ranks cut no tile, nor 4 with 128 KiB of
    weights in each, nor 6, 8, 12 or 16 with 256 KiB. Vectors of up to 65,536 elements and scales
    need no old bits. Larger int8 matrices, and matrices of which a trainer's rank holds no
    consecutive elements, are stored as ``step``."""

    dtype: str | None = None
    """Wire dtype of floating point weights, as safetensors names it (``BF16``); a torch dtype, such
    as ``torch.bfloat16``, is turned into that name. By default, each weight's dtype in the
    checkpoint that the model was loaded from, else its own: fp32, of which nearly all elements
    change in a step, for masters without a checkpoint. Weights of a quantised checkpoint that the
    model has dequantised, and what a class of transformers keeps in fp32 in a 16-bit model, have
    their own as well. ``model`` publishes each weight in its dtype in the model, as
    ``save_pretrained`` writes it. A finite value that the wire dtype cannot have is refused."""

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

    snapshot: Literal["host", "device", "disk"] | None = None
    """Memory of the last published bits of weights on a device: pinned on the host, from where they
    are copied to the device for each diff, or on the device. By default the device if that leaves
    half of its memory free, and room for an optimizer's first step; which one is logged. Weights on
    the host are compared in place. ``disk`` keeps the bits of all weights in a file in ``TMPDIR``,
    for hosts without the memory; each diff reads it."""

    anchor_factor: Positive = ANCHOR_FACTOR
    """Size of a newcomer's plan, in anchors, above which another anchor is added. Anchors and
    manifests cost at most ``1 / (anchor_factor - 1)`` of the deltas: by default half of them, with
    an anchor every few hundred versions at 1 % density."""

    anchor_every: AtLeastOne | None = None
    """Number of versions between two anchors, whatever they cost; replaces ``anchor_factor``."""

    anchor_format: Literal["planes", "safetensors"] = "planes"
    """Form of anchors: compressed byte planes; or ``safetensors``, half as large again, so that the
    store is a checkpoint as well: ``from_pretrained`` loads its newest such anchor, and so does
    ``safe_open`` part by part. Ranks must hold whole tensors. A maintainer adds byte planes, so
    that ``maintain`` excludes it."""

    maintain: bool | KeepRule = False
    """Whether rank 0 maintains the chain in a thread, with a rule of what pruning keeps: as
    ``deltachain maintain`` does, it adds skips and anchors, and deletes what the rule drops (by
    default all but the newest 1024 versions and tagged ones). The publisher then adds an anchor
    itself only if newcomers have no way left."""

    anchor_memory: NotNegative = 0.5
    """Memory of a rank for old bits while an anchor is on its way, as a share of its weights' size.
    Later versions are published meanwhile; the old bits of each (10 bytes a change in bf16) are
    kept until the anchor has passed their tensor. The version that exceeds this share stays in
    flight until the anchor has landed."""

    continue_reverted: bool = False
    """Whether to continue a head that `deltachain revert` committed, with other weights than it
    has. By default, a publisher that starts there with other weights refuses, since its first
    version would undo the revert."""

    take_over: bool = False
    """Whether to go on where another publisher is at work, which is thereby ended. By default, a
    second publisher refuses. One that was killed is not at work: a restart needs no setting, but
    elsewhere than on the same machine waits up to 25 seconds to be sure."""

    when_busy: Literal["cover", "wait"] = "cover"
    """Behaviour of ``publish`` while a version is in flight: leave the changes to the next call, or
    wait for that version."""

    on_error: Literal["raise", "warn"] = "raise"
    """Effect of a failed publish: an error at the next call, or a log entry, with the changes
    covered by the next version."""

    deadline_s: Positive = 300.0
    """Timeout of rank 0 for the other ranks, in seconds, in ``publish`` and for their parts of a
    version; then nothing is committed, and ``on_error`` applies. Other ranks wait three times as
    long for rank 0, which may itself wait for one of them and then for the store."""

    part_nbytes: AtLeastOne = 512 << 20
    """Largest size of changes in one object before compression, in bytes."""

    signing_key: Path | None = None
    """File of the private key that signs manifests, edge records and the chain's identity, as
    written by ``deltachain keygen``; ``None``: the file in ``DELTACHAIN_SIGNING_KEY``, if any. A
    publisher with a key continues only a chain that this key, or one in
    ``DELTACHAIN_TRUSTED_KEYS``, has signed. Only rank 0 needs the file."""

    metrics: str | None = None
    """Address at which rank 0 serves metrics for Prometheus while it is attached, ``9095`` or
    ``0.0.0.0:9095``; without a host, of the loopback interface alone. Needs the extra ``server``.
    ``None``: no server."""

    metadata: dict[str, str] = field(default_factory=dict)
    """User metadata, written into every manifest: text by name."""

    @classmethod
    def at(cls, url: str, config: "PublishConfig | None", **settings: Any) -> "PublishConfig":  # noqa: ANN401 - fields
        """Return settings for a URL.

        Args:
            url: Location of the chain; replaces the one in ``config``.
            config: All settings, if given.
            settings: Single settings, by field name.

        Raises:
            ConfigError: ``config`` is something else, or a value is not allowed.
        """
        if config is None:
            return cls(url=url, **settings)
        if not isinstance(config, cls):
            raise ConfigError(
                f"config is a {type(config).__name__}, expected a PublishConfig",
                hint="give single settings by name: attach(model, encoding='overwrite')",
            )
        return replace(config, url=url, **settings)

    @classmethod
    def of(cls, config: "PublishConfig | Location") -> "PublishConfig":
        """Return settings, also for a URL or a folder alone."""
        return config if isinstance(config, cls) else cls(url=location_of(config))

    def __post_init__(self) -> None:
        if isinstance(self.url, os.PathLike):
            object.__setattr__(self, "url", os.fspath(self.url))
        for name in ("base", "assets", "signing_key"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, Path(value).expanduser())
        object.__setattr__(self, "dtype", _wire_name(self.dtype))
        check_kinds(self)
        ENCODINGS.chosen(self.encoding)
        Quantization.chosen(self.quantization)
        parse_address(self.metrics or "0")
        if self.quantization is not None and self.base is not None:
            raise ConfigError(
                "base and quantization exclude each other: a base has the bits of version 0",
                hint="give the folder as assets, and leave out base",
            )
        if self.maintain and self.anchor_format != "planes":
            raise ConfigError(
                "anchor_format and maintain exclude each other: a maintainer adds byte planes",
                hint="leave one out",
            )


def _wire_name(dtype: Any) -> Any:  # noqa: ANN401 - of any type until it is checked
    name = dtype
    if type(dtype).__module__ == "torch":  # not imported for a name
        from deltachain.torch_names import WIRE_NAMES  # noqa: PLC0415

        name = WIRE_NAMES.get(dtype, str(dtype))
    if isinstance(name, str) and name not in (*_FLOATS, AS_IN_MODEL):
        raise ConfigError(
            f"dtype={dtype!r}: expected one of {', '.join(_FLOATS)}, such a dtype of torch, or "
            f"{AS_IN_MODEL!r}",
            hint="for example dtype='BF16', or dtype=torch.bfloat16",
        )
    return name

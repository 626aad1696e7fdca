"""The kernels of tiles, imported on first use: see :mod:`deltachain.kernels.host`."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltachain.codec.encodings.max.classes import count_bins
    from deltachain.codec.encodings.max.decoder import decode_tiles, stage_tiles
    from deltachain.codec.encodings.max.encoder import encode_tiles

_HOMES = {
    "count_bins": "classes",
    "decode_tiles": "decoder",
    "encode_tiles": "encoder",
    "stage_tiles": "decoder",
}

__all__ = ["count_bins", "decode_tiles", "encode_tiles", "stage_tiles"]


@cache
def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"deltachain.codec.encodings.max.{_HOMES[name]}"), name)

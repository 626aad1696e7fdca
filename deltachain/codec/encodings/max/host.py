"""The kernels of tiles: numba's if it is installed, the reference otherwise."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltachain.codec.encodings.max.tiles import (
        count_bins,
        decode_tiles,
        encode_tiles,
        stage_tiles,
    )

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
    # numba is slow to import; see deltachain.kernels.host.
    home = _HOMES[name] if find_spec("numba") is not None else "tiles"
    return getattr(import_module(f"deltachain.codec.encodings.max.{home}"), name)

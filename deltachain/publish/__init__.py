"""Find changed weights, encode them, and commit them as the next version."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from deltachain.publish.config import PublishConfig as PublishConfig
    from deltachain.publish.hf_trainer import DeltaChainCallback as DeltaChainCallback
    from deltachain.publish.hook import Attachment as Attachment
    from deltachain.publish.hook import attach as attach
    from deltachain.publish.publisher import Publisher as Publisher
    from deltachain.publish.quantise.settings import Quantization as Quantization
    from deltachain.publish.session import PublishReceipt as PublishReceipt

_HOME: Final = {
    "Attachment": "hook",
    "DeltaChainCallback": "hf_trainer",
    "PublishConfig": "config",
    "PublishReceipt": "session",
    "Publisher": "publisher",
    "Quantization": "quantise.settings",
    "attach": "hook",
}
"""Module of each public name, imported on first use: `revert` needs no torch."""

__all__ = sorted(_HOME)  # noqa: PLE0605 - the names are strings


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public object
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

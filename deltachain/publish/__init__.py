"""Publishing: find changed weights, encode them, and commit them as the next version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltachain.publish.config import PublishConfig
from deltachain.publish.hook import Attachment, attach
from deltachain.publish.publisher import Publisher
from deltachain.publish.quantise.settings import Quantization
from deltachain.publish.receipt import PublishReceipt

if TYPE_CHECKING:
    from deltachain.publish.integrations.hf_trainer import DeltaChainCallback

__all__ = [
    "Attachment",
    "DeltaChainCallback",
    "PublishConfig",
    "PublishReceipt",
    "Publisher",
    "Quantization",
    "attach",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the callback needs transformers
    if name != "DeltaChainCallback":
        raise AttributeError(f"module 'deltachain.publish' has no attribute {name!r}")
    from deltachain.publish.integrations.hf_trainer import DeltaChainCallback  # noqa: PLC0415

    return DeltaChainCallback

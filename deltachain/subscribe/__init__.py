"""Plan, fetch, verify and swap versions into a target."""

from typing import TYPE_CHECKING, Any

from deltachain.status import Status
from deltachain.subscribe.config import SubscribeConfig
from deltachain.subscribe.receipt import ApplyReceipt, Staged
from deltachain.subscribe.subscriber import Subscriber
from deltachain.subscribe.targets.base import HeldVersion, Prepared, Target
from deltachain.subscribe.targets.folder import FolderTarget
from deltachain.subscribe.targets.tensor_patch import Patch

if TYPE_CHECKING:
    from deltachain.subscribe.targets.tensors import TensorTarget as TensorTarget

__all__ = [
    "ApplyReceipt",
    "FolderTarget",
    "HeldVersion",
    "Patch",
    "Prepared",
    "Staged",
    "Status",
    "SubscribeConfig",
    "Subscriber",
    "Target",
    "TensorTarget",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class, imported with torch when it is used
    if name != "TensorTarget":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deltachain.subscribe.targets.tensors import TensorTarget  # noqa: PLC0415

    return TensorTarget

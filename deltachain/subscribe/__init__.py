"""The replica's side: plan, fetch, prove, swap."""

from deltachain.subscribe.config import SubscribeConfig
from deltachain.subscribe.folder import FolderTarget
from deltachain.subscribe.patch import Patch
from deltachain.subscribe.receipt import ApplyReceipt
from deltachain.subscribe.stage import Staged
from deltachain.subscribe.status import Status
from deltachain.subscribe.subscriber import Subscriber
from deltachain.subscribe.target import Held, Prepared, Target
from deltachain.subscribe.tensors import TensorTarget

__all__ = [
    "ApplyReceipt",
    "FolderTarget",
    "Held",
    "Patch",
    "Prepared",
    "Staged",
    "Status",
    "SubscribeConfig",
    "Subscriber",
    "Target",
    "TensorTarget",
]

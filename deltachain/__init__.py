"""Ship the bits that an optimizer step changed, and write them into live inference weights.

>>> import deltachain
>>> deltachain.attach(model, optimizer, url="/mnt/policy")          # doctest: +SKIP
>>> deltachain.Subscriber("/mnt/policy", model).update()            # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from deltachain.version import __version__ as __version__

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain as Chain
    from deltachain.control.announce import Fleet as Fleet
    from deltachain.errors import DeltaChainError as DeltaChainError
    from deltachain.integrations.trl import DeltaChainWeightTransfer as DeltaChainWeightTransfer
    from deltachain.publish import DeltaChainCallback as DeltaChainCallback
    from deltachain.publish import PublishConfig as PublishConfig
    from deltachain.publish import Publisher as Publisher
    from deltachain.publish import PublishReceipt as PublishReceipt
    from deltachain.publish import Quantization as Quantization
    from deltachain.publish import attach as attach
    from deltachain.store import open_store as open_store
    from deltachain.subscribe import ApplyReceipt as ApplyReceipt
    from deltachain.subscribe import SubscribeConfig as SubscribeConfig
    from deltachain.subscribe import Subscriber as Subscriber

_HOME: Final = {
    "ApplyReceipt": "deltachain.subscribe",
    "Chain": "deltachain.chain.chain",
    "DeltaChainCallback": "deltachain.publish",
    "DeltaChainError": "deltachain.errors",
    "DeltaChainWeightTransfer": "deltachain.integrations.trl",
    "Fleet": "deltachain.control.announce",
    "PublishConfig": "deltachain.publish",
    "PublishReceipt": "deltachain.publish",
    "Publisher": "deltachain.publish",
    "Quantization": "deltachain.publish",
    "SubscribeConfig": "deltachain.subscribe",
    "Subscriber": "deltachain.subscribe",
    "attach": "deltachain.publish",
    "open_store": "deltachain.store",
}
"""Package of each public name, imported on first use, so that torch is optional."""

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604 - the names are strings


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public object
    if name not in _HOME:
        raise AttributeError(f"module 'deltachain' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)

"""The control plane: what is asked of replicas over HTTP."""

from deltachain.control.client import ReplicaClient
from deltachain.control.fleet import Announced, Fleet

__all__ = ["Announced", "Fleet", "ReplicaClient"]

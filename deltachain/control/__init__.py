"""The control plane: what is asked of replicas over HTTP."""

from deltachain.control.client.fleet import Announced, Fleet
from deltachain.control.client.replica import ReplicaClient

__all__ = ["Announced", "Fleet", "ReplicaClient"]

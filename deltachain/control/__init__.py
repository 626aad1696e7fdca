"""The control plane: HTTP routes of replicas, their clients, and a sidecar for stock servers."""

from deltachain.control.client.fleet import Announced, Fleet
from deltachain.control.client.replica import ReplicaClient

__all__ = ["Announced", "Fleet", "ReplicaClient"]

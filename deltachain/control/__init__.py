"""The control plane: HTTP routes of replicas, their clients, and a sidecar for stock servers."""

from deltachain.control.fleet import Announced, Fleet
from deltachain.control.replica_client import ReplicaClient

__all__ = ["Announced", "Fleet", "ReplicaClient"]

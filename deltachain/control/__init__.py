"""The control plane: HTTP routes of replicas, their clients, and an agent for stock servers."""

from deltachain.control.fleet import Announced, Fleet
from deltachain.control.replica_client import ReplicaClient

__all__ = ["Announced", "Fleet", "ReplicaClient"]

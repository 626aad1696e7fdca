"""HTTP routes of replicas, their clients, and an agent for stock servers."""

from .announce import Announced, Fleet
from .replica_client import ReplicaClient

__all__ = ["Announced", "Fleet", "ReplicaClient"]

"""A cluster of Ray whose nodes are on this machine."""

import os
from typing import Any, Final

import ray
from ray.cluster_utils import Cluster

from examples.demo.online.processes import free_port

SMALL: Final = 100 << 20  # bytes of an object store
AGENTS: Final = ("metrics_agent_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
"""A node waits for agents whose ports are not given, but not for long."""


def clustered(*nodes: dict[str, Any]) -> Cluster:
    """Start nodes with the given resources, the head first, and connect to them."""
    # A busy machine would starve workers of priority 15, and its memory is not theirs alone.
    os.environ |= {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
    cluster, given = Cluster(), {"num_cpus": 2, "object_store_memory": SMALL}
    for node in nodes:
        ports = {name: free_port() for name in AGENTS}
        cluster.add_node(**{**given, **ports, "include_dashboard": False, **node})
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster

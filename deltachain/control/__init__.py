"""The control plane: what is asked of replicas over HTTP."""

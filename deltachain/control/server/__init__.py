"""The server side of the control plane: routes, who may call them, and how a replica starts."""

"""Server side of the control plane: routes, authorization, and the startup of a replica."""

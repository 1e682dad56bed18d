"""Search spaces: states of nodes, hubs and parameters as small integers, with their prices."""

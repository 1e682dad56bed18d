"""What the searches with a cost model choose among: states of nodes, hubs and parameters as small integers, and prices."""

"""What searches choose among: states of nodes, hubs and parameters as small integers, and what each costs."""

"""Every policy on the same core, over the same agents, on the same imagined machines."""

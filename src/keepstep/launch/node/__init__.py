"""What runs beside the workers on this node: the agent, the snapshot cache, checks of the node."""

"""``keepstep check``: what one node is like, and whether the nodes of a job fit each other, before a job is there."""

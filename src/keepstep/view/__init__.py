"""What is seen of a run from outside of it: one snapshot and its samples, which page, terminal and metrics show."""

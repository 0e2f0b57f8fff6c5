"""From flags, settings and environment to a `Job`, its run folder and its placement."""

"""From the ring of one rank to iterations, summaries and where the rank is now. Start with `watch`."""

"""The shared vocabulary: what the rooms pass to each other. Pure, no I/O, no torch."""

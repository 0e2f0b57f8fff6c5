"""Snapshots in the node's memory: the cache, its slots, and the states kept in them."""

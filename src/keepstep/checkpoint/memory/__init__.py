"""Snapshots in the node's memory.

The launcher owns the `Cache`, and the `CacheServer` hands its memory out. `RankSlots` is what a worker sees of it,
`CachedStates` what the agent sees: both map each `Slot` and the `Board`.
"""

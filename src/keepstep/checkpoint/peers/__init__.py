"""Snapshots from and to other nodes: who backs up whom, and the connections that states go over."""

"""Backups between nodes: which node backs up which, and the transfer of states from one node's cache to another's."""

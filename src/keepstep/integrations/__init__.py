"""Surfaces in other people's frameworks: each module needs its framework, and changes no file of it."""

"""Integrations with training frameworks: each module needs its framework installed, and changes no file of it."""

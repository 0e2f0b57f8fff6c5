"""Benchmarks: ``python -m benchmarks.NAME [--quick] [--json FILE] [--samples DIR]`` from the repository's root."""

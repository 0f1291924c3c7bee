"""Measurements. ``python -m benchmarks`` prints every table; each figure is a ratio taken within one run."""

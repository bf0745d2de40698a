"""Benchmarks: one module a question, ratios to one memcpy in the same run. `python -m bench --help`."""

"""Benchmarks: one module each, run by ``kvproof bench NAME``."""

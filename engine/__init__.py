"""The instrumented paged-cache engine.

It speaks the vocabulary of :mod:`kvproof.invariants` (outcomes, events) and knows no check.
"""

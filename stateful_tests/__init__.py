"""Subjects, Hypothesis machines, strategies, and examples of engines and policies."""

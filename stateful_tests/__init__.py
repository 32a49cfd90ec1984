"""Subjects, Hypothesis machines, strategies and the pytest plugin."""

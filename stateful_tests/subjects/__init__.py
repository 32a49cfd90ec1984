"""Subjects: what is driven."""

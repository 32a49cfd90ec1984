"""Campaigns, shrinking, reports, seeded faults, the command line: the top floor."""

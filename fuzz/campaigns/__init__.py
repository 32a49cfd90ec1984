"""Campaigns: what runs for hours on many workers, and what it leaves behind."""

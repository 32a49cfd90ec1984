"""The command line.  ``kvproof COMMAND --help`` teaches each command by an example."""

from __future__ import annotations

from kvproof.fuzz.cli.app import main

__all__ = ["main"]

"""What every test needs before anything of kvproof is imported."""

import os

# On GitHub Actions typer writes colours although there is no terminal, and fixes that at import.
os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"

"""What tests of all foreign engines share is in a folder of its own.

Not in that above: there this folder would pass as a package of the engine's name.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

"""Ground floor: the vocabulary, and what must hold.  Imports nothing else of kvproof."""

"""What must hold one floor above the cache: iterations, plans, promises, progress."""

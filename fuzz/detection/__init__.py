"""The benchmark of bug finding: how fast each driver finds each seeded fault."""

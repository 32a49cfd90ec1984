"""Request traces: read them, make small ones, replay them over a subject in virtual time."""

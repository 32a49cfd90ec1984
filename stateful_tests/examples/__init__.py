"""Examples to copy: policies, a template of a subject, and a small engine as a subject."""

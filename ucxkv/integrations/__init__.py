"""Connectors to inference backends; each is imported by its own name, and only then needs it."""

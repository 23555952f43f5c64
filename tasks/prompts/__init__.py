"""Prompt sets: rows from ``datasets``, local files and built-in sets."""

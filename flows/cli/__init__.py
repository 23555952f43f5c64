"""The ``kivi`` command: what it takes and what it prints."""

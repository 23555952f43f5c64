"""The comparison of backends: parity with the definition, and speed. `python -m kivi.measure.backends` runs it."""

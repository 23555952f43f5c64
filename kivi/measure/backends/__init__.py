"""The comparison of backends: parity with the definition, and speed."""

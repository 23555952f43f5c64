"""What kivi measures, and the typed results."""

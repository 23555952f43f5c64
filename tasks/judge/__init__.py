"""The verdict: what was measured against limits, and against earlier nights."""

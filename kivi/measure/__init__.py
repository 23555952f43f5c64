"""What kivi measures, and the typed results."""


class MeasureError(RuntimeError):
    """A measurement that cannot be made, or that would mean nothing; the message is one sentence with the numbers."""

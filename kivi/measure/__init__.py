"""What kivi measures, and the typed results."""

import importlib.util

if importlib.util.find_spec("scipy") is None:
    raise ModuleNotFoundError("kivi.measure needs scipy: pip install 'kivi-mlx[measure]'", name="scipy")


class MeasureError(RuntimeError):
    """A measurement that cannot be made, or that would mean nothing; the message is one sentence with the numbers."""

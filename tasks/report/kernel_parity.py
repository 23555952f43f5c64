"""Kernel parity, as the report shows it: what attention on codes adds to the quantiser's own error, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence

from kivi.backends import NAMES
from kivi.measure.results import CellResult
from tasks.run.night import Night

PARITY_LEGEND = (
    "Each packed cache is scored twice on the same codes: dequantised for standard attention, which shows the quantiser's "
    "error, and attended on its codes, whose distance from that is the kernels'. `kivi compare` compares backends bit for bit."
)


def parity_lines(night: Night) -> list[str]:
    """Return a sentence for each packed cell, then one for each backend that no cell ran on."""
    cells = [_cell(outcome.cell.label, outcome.result) for outcome in night.outcomes if outcome.result is not None]
    return [line for line in cells if line] + _not_run(night.results)


def _cell(label: str, result: CellResult) -> str:
    quality = result.quality
    if quality.control_kl_mean is None or quality.kernel_kl_mean is None:
        return ""
    return (
        f"{label}, backend {result.provenance.backend}: the quantiser's KL is {quality.control_kl_mean:.3g} nats, "
        f"attention on codes is {quality.kernel_kl_mean:.2g} nats from it"
    )


def _not_run(results: Sequence[CellResult]) -> list[str]:
    ran = {result.provenance.backend for result in results}
    return [f"{name}: not run in this night" for name in NAMES if name not in ran]

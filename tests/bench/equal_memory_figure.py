"""Draw README's picture, quality at equal memory at 4,096 tokens, from what ``equal_memory.py`` measured.

    python tests/bench/equal_memory_figure.py

It reads ``results/equal_memory_f16_h200.json`` and writes ``docs/equal_memory_light.svg`` and ``docs/equal_memory_dark.svg``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from kivi.spec import CacheSpec
from tasks.report.figures import INK, PALETTE, STYLE, new_figure, svg

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "equal_memory_f16_h200.json"
DOCS = HERE.parents[1] / "docs"
TOKENS = 4096
FULL_BYTES = 2 * 2 * 3 * 64 * 30  # keys and values, bytes, heads, channels and layers of the model that was measured
THEMES = {"light": ("#1f2328", PALETTE[0]), "dark": ("#e6edf3", PALETTE[4])}  # text as GitHub's, and a blue that stands out
NAMED = {  # the settings that README recommends
    "kivi:k3v2,g64,s64,hkv": "smallest",
    "kivi:k4v3,g64,s64,hkv": "start here",
    "kivi:k8v8,g64,r0,hkv": "safest",
}


def main() -> None:
    for theme in THEMES:
        (DOCS / f"equal_memory_{theme}.svg").write_text(picture(json.loads(RESULTS.read_text()), theme))


@mpl.rc_context(STYLE)
def picture(measured: dict[str, Any], theme: str) -> str:
    """Return the picture as SVG, in the colours of ``theme``."""
    ink, blue = THEMES[theme]
    rows = [row for row in measured["results"]["rows"] if row["tokens"] == TOKENS]
    curves = measured["results"]["curves"]
    figure, (axes,) = new_figure(3.9)
    for family, colour, marker in (("mlx-quantized", PALETTE[3], "s"), ("kivi", blue, "o")):
        members = {row["spec"]: (row["bytes_per_token"], row["kl_mean"]) for row in rows if row["family"] == family}
        best = sorted((members[slug], slug) for slug in curves[f"{family} at {TOKENS}"])
        axes.plot(*zip(*members.values(), strict=True), marker, color=colour, alpha=0.35, markersize=3.5)
        axes.plot(*zip(*[point for point, _ in best], strict=True), f"-{marker}", color=colour, markersize=5, linewidth=1.2)
        label_points(axes, best, colour)
    axes.axvline(FULL_BYTES, color=INK, linewidth=1, linestyle="--")
    axes.text(FULL_BYTES - 150, 1e-4, f"full cache\n{FULL_BYTES:,} bytes\nKL 0", ha="right", va="center")
    axes.text(8500, 0.02, "mlx-lm's quantised cache", color=PALETTE[3], weight="bold")
    axes.text(7200, 8e-5, "kivi", color=blue, weight="bold", ha="right", va="top")
    axes.set_yscale("log")
    axes.set_xlim(2000, FULL_BYTES + 700)
    axes.set_yticks([1e-4, 1e-3, 1e-2, 1e-1, 1], ["0.0001", "0.001", "0.01", "0.1", "1"])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel(f"bytes a token at {TOKENS:,} tokens, all layers (16-bit model)")
    axes.set_ylabel("KL from the full cache, nats")
    axes.grid(alpha=0.2)
    return svg(figure, ink)


def label_points(axes: Axes, best: list[tuple[tuple[float, float], str]], colour: str) -> None:
    """Write beside the best point of each number of bits what it is, and the settings that README recommends in bold."""
    last = {}
    for point, slug in best:
        spec = CacheSpec.parse(slug).model_copy(update={"backend": "auto"})
        bits = f"{spec.key_bits} bits" if spec.kind == "mlx-quantized" else f"k{spec.key_bits}v{spec.value_bits}"
        if last.get(bits, ("", ""))[1] == "":
            last[bits] = (point, NAMED.get(spec.text, ""))
        last[bits] = (point, NAMED[spec.text]) if spec.text in NAMED else last[bits]
    for bits, (point, name) in last.items():
        right = bits.endswith("bits")
        axes.annotate(
            f"{bits}, {name}" if name else bits,
            point,
            xytext=(7, 3) if right else (-7, -4),
            textcoords="offset points",
            ha="left" if right else "right",
            va="bottom" if right else "top",
            color=INK if name or right else colour,
            weight="bold" if name else "normal",
            fontsize=8,
        )


if __name__ == "__main__":
    main()

"""Put the table of a night into README, between its two ``nightly`` comments.

python tests/bench/readme_night.py mlruns/reports/nightly-2026-12-01-0123abcd.md
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def main() -> None:
    options_of = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of.add_argument("report", type=Path, help="the Markdown of a night's report")
    README.write_text(with_night(README.read_text(), options_of.parse_args().report.read_text()))


def with_night(readme: str, report: str) -> str:
    """Return README with title, verdict, device, duration and table of a night's report, and nothing of another night."""
    title, verdict = re.findall(r"^(?:# |\*\*)(.+?)(?:\*\*)?$", report, re.MULTILINE)[:2]
    (device,) = re.findall(r"^- device: (.+)$", report, re.MULTILINE)
    took = re.findall(r"([^,]+) in all\.$", report, re.MULTILINE)
    (table, *_) = re.findall(r"^\| cache .*\n\|[-|]+\n(?:\|.*\n)+", report, re.MULTILINE)
    said = f"`make nightly`, {title}, on {device}: {verdict}" + (f", in {took[0].strip()}" if took else "")
    text = f"<!-- nightly -->\n{said}.\n\n{re.sub(r' +$', '', table, flags=re.MULTILINE)}<!-- /nightly -->"
    return re.sub(r"<!-- nightly -->.*<!-- /nightly -->", lambda _: text, readme, flags=re.DOTALL)


if __name__ == "__main__":
    main()

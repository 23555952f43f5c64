"""``python -m flows.servers``: start, end or become the servers of this machine; ``make up``, systemd and launchd call it."""

from __future__ import annotations

import sys
from pathlib import Path

from flows import plain_output
from flows.errors import sentence
from flows.serve.background import ServerError
from flows.serve.servers import NAMES, down, run, up

USAGE = f"""usage: python -m flows.servers up|down [TRACKING_DIR]
       python -m flows.servers run {"|".join(NAMES)} [TRACKING_DIR]
"""


def main(arguments: list[str]) -> int:
    """Run ``python -m flows.servers``; return the exit code: 1 for a server that failed, 2 for bad usage."""
    plain_output.allow()
    try:
        match arguments:
            case ["up", *rest] if len(rest) < 2:
                addresses = up(Path(*rest or ["mlruns"]), Path.cwd(), _say)
                sys.stdout.write(f"Prefect  {addresses.prefect}\nMLflow   {addresses.mlflow}\n")
                sys.stdout.write(f"prefect and kivi find it with: export PREFECT_API_URL={addresses.prefect}/api\n")
            case ["down", *rest] if len(rest) < 2:
                ended = down(Path(*rest or ["mlruns"]))
                sys.stdout.write(f"ended: {', '.join(ended) or 'nothing ran'}\n")
            case ["run", name, *rest] if name in NAMES and len(rest) < 2:
                run(name, Path(*rest or ["mlruns"]))
            case _:
                sys.stderr.write(USAGE)
                return 2
    except Exception as error:
        usage = sentence(error)
        if not usage and not isinstance(error, ServerError):
            raise
        sys.stderr.write(f"kivi: {usage or error}\n")
        return 2 if usage else 1
    return 0


def _say(step: str) -> None:
    sys.stderr.write(f"{step}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The limit of open files that mlx-lm needs: it sets one of its own when it is imported, which the system may refuse."""

from __future__ import annotations

import resource

MLX_LM = (2048, 4096)  # the soft and the hard limit that mlx_lm.utils sets


class OpenFilesError(ImportError):
    """mlx-lm cannot be imported here; one sentence says what to do."""


def require_open_files() -> None:
    """Set the limits that mlx-lm sets when it is imported.

    Raises:
        OpenFilesError: the system refuses, since this process's hard limit is lower.
    """
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, MLX_LM)
    except (ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OpenFilesError(
            f"the hard limit of open files is {hard}, and mlx-lm needs {MLX_LM[1]}: raise it (`ulimit -Hn`, "
            "LimitNOFILE= in systemd, --ulimit nofile= in Docker)"
        ) from None


require_open_files()

"""KIVI KV caches for MLX (arXiv:2402.02750): packed, attended on their codes, each byte audited."""

from kivi.blas import BLAS  # first: it must run before mlx.core is loaded

__version__ = "0.1.0"
__all__ = ["BLAS"]

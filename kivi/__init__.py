"""KIVI KV caches for MLX (arXiv:2402.02750): packed, attended on their codes, each byte audited."""

from kivi.blas import BLAS  # first: it must run before mlx.core is loaded
from kivi.open_files import OpenFilesError as OpenFilesError  # and this before mlx_lm

# isort: split
from kivi.accounting import CacheBytes
from kivi.build import install, make_prompt_cache
from kivi.cache.batch import BatchKIVICache
from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec

__version__ = "0.1.0"
__all__ = [
    "BLAS",
    "BatchKIVICache",
    "CacheBytes",
    "CacheSpec",
    "KIVICache",
    "RoundTripKIVICache",
    "install",
    "make_prompt_cache",
]

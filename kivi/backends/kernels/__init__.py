"""The kernels: how they are composed, compiled and launched. Their text is in ``bodies``, ``headers`` and ``preludes``."""

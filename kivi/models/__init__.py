"""Models: the embedded one, folders in mlx-lm's format, and pinned revisions from Hugging Face."""

from kivi.models.loading import (
    EMBEDDED,
    LoadedModel,
    ModelError,
    Origin,
    check_model,
    find_commit,
    load_model,
    local_tokenizer,
    weights_digest,
)

__all__ = [
    "EMBEDDED",
    "LoadedModel",
    "ModelError",
    "Origin",
    "check_model",
    "find_commit",
    "load_model",
    "local_tokenizer",
    "weights_digest",
]

"""What a router knows of its workers' model from the folder alone: limits, name, identity."""

from __future__ import annotations

from core.errors import InvalidArgument, StartupError
from core.model_folder import ModelFolder, model_digest
from router.validate import ModelLimits, check_defaults


def model_limits(folder: ModelFolder, served_name: str | None) -> ModelLimits:
    """By the model's own folder. Raises StartupError when its defaults break the rules."""
    limits = ModelLimits(
        served_name=served_name or folder.served_name,
        vocab_size=folder.vocab_size,
        max_model_len=folder.context_length,
        eos_token_ids=folder.eos_token_ids,
        defaults=folder.default_sampling,
    )
    try:
        check_defaults(limits)
    except InvalidArgument as error:
        path = folder.path / "generation_config.json"
        raise StartupError(f"{path}: {error.message}") from None
    return limits


def published_digest(folder: ModelFolder) -> str | None:
    """The model's identity as its workers publish it; it takes weights to tell.

    From the hub a router has none, or those that a worker has fetched into their common cache.
    """
    try:
        return model_digest(folder.path)
    except StartupError:
        return None

"""How fast prompts are computed here, learned from steps."""

from __future__ import annotations

_DECAY = 0.9


class ComputeMeter:
    """Seconds per prompt token: of recent steps together, so that large ones count more."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._seconds = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """One finished step, which computed so many tokens of prompts."""
        self._num_tokens = self._num_tokens * _DECAY + num_tokens
        self._seconds = self._seconds * _DECAY + seconds

    @property
    def s_per_token(self) -> float:
        """0 before anything was observed."""
        return self._seconds / self._num_tokens if self._num_tokens else 0.0

    def expected_s(self, num_tokens: int) -> float:
        """0 before anything was observed."""
        return self.s_per_token * num_tokens

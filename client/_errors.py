"""The boundary at which gRPC's errors become Baton's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc

from core.errors import ERROR_METADATA_KEY, BatonError, Unavailable, from_exception


def translate(error: grpc.RpcError, server: str) -> BatonError:
    """What `error` means to a caller; a lost or missing server is named."""
    metadata = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    is_ours = any(key == ERROR_METADATA_KEY for key, _ in metadata)
    if error.code() is grpc.StatusCode.UNAVAILABLE and not is_ours:
        return Unavailable(f"cannot reach {server}: {error.details() or 'connection lost'}")
    return from_exception(error)

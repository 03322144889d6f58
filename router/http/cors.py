"""Which web pages may call: CORS, whose refusals are error objects as all others are."""

from __future__ import annotations

import orjson
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from router.http.errors import HttpError


class CorsPolicy(CORSMiddleware):
    """starlette's, whose refusals of a browser's question before a call are plain text."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 400:
            error = HttpError(400, bytes(response.body).decode(), code="cors_refused")
            response.body = orjson.dumps(error.body)
            response.headers["content-type"] = "application/json"
            response.headers["content-length"] = str(len(response.body))
        return response

"""What a server means by the way in which it ends a call."""

from __future__ import annotations

import grpc
import pytest

from router.grpc_client.status import (
    CallFailed,
    check_answer,
    check_end,
    of_reset,
    request_headers,
)

ANSWER = {b":status": b"200", b"content-type": b"application/grpc"}


def failure(check, **fields: str) -> str:
    """Names are written with "_"."""
    named = {name.replace("_", "-").encode(): value.encode() for name, value in fields.items()}
    with pytest.raises(CallFailed) as caught:
        check(named)
    return str(caught.value)


def test_a_call_says_what_it_calls():
    assert request_headers("/a.B/C", "worker:1", is_encrypted=True) == [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", b"/a.B/C"),
        (b":authority", b"worker:1"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    assert (b":scheme", b"http") in request_headers("/", "", is_encrypted=False)


def test_a_call_that_ends_well_raises_nothing():
    check_answer(ANSWER)
    check_answer(ANSWER | {b"content-type": b"application/grpc+proto"})
    check_end({b"grpc-status": b"0"})
    check_end(ANSWER | {b"grpc-status": b"0", b"grpc-message": b"fine"})


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        ("14", "", "UNAVAILABLE: "),
        ("3", "100%25 g%C3%BCnstig", "INVALID_ARGUMENT: 100% günstig"),
        ("13", "cut %C3 %zz", "INTERNAL: cut \ufffd %zz"),
        ("99", "?", "UNKNOWN: ?"),
        ("fine", "?", "UNKNOWN: ?"),
    ],
)
def test_a_status_has_a_name_and_a_message(status, message, expected):
    assert failure(check_end, grpc_status=status, grpc_message=message) == expected


@pytest.mark.parametrize(
    ("http_status", "expected"),
    [
        ("400", "INTERNAL"),
        ("401", "UNAUTHENTICATED"),
        ("403", "PERMISSION_DENIED"),
        ("404", "UNIMPLEMENTED"),
        ("429", "UNAVAILABLE"),
        ("502", "UNAVAILABLE"),
        ("503", "UNAVAILABLE"),
        ("504", "UNAVAILABLE"),
        ("500", "UNKNOWN"),
        ("200", "UNKNOWN"),
    ],
)
def test_without_a_status_that_of_http_tells(http_status, expected):
    message = f"{expected}: an end without grpc-status, HTTP status {http_status}"
    assert failure(check_end, **{":status": http_status}) == message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({":status": "404", "content_type": "text/html"}, "UNIMPLEMENTED: an end without"),
        (
            {":status": "503", "grpc_status": "8", "grpc_message": "full"},
            "RESOURCE_EXHAUSTED: full",
        ),
        ({":status": "302", "grpc_status": "0"}, "UNKNOWN: this is not gRPC: HTTP status 302"),
        ({":status": "200", "content_type": "text/html"}, "UNKNOWN: this is not gRPC"),
        ({":status": "200", "content_type": "application/grpc-web"}, "UNKNOWN: this is not gRPC"),
        ({}, "UNKNOWN: an end without grpc-status, HTTP status "),
    ],
)
def test_what_is_not_grpc_is_no_answer(fields, expected):
    assert failure(check_answer, **fields).startswith(expected)


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        (7, grpc.StatusCode.UNAVAILABLE, "the stream was reset: REFUSED_STREAM"),
        (8, grpc.StatusCode.CANCELLED, "the stream was reset: CANCEL"),
        (11, grpc.StatusCode.RESOURCE_EXHAUSTED, "the stream was reset: ENHANCE_YOUR_CALM"),
        (12, grpc.StatusCode.PERMISSION_DENIED, "the stream was reset: INADEQUATE_SECURITY"),
        (2, grpc.StatusCode.INTERNAL, "the stream was reset: INTERNAL_ERROR"),
        (77, grpc.StatusCode.INTERNAL, "the stream was reset: error 77"),
    ],
)
def test_a_reset_is_a_status(code, status, message):
    ended = of_reset(code)
    assert (ended.code, ended.message) == (status, message)

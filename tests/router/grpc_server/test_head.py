"""Headers of requests and answers."""

from __future__ import annotations

import grpc
import pytest

from core.http2.messages import Refused
from router.grpc_server.head import NotGrpc, read_head, trailers


def headers(*more, **replaced) -> list[tuple[bytes, bytes]]:
    """Of a call; names in `replaced` are written with "_"."""
    fields = {
        ":method": "POST",
        ":path": "/test.Probe/Echo",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    fields |= {name.replace("_", "-"): value for name, value in replaced.items()}
    return [*((name.encode(), value.encode()) for name, value in fields.items()), *more]


def test_a_call_has_a_path_and_metadata():
    head = read_head(headers((b"authorization", b"Bearer x"), (b"user-agent", b"u")))
    assert head.path == "/test.Probe/Echo"
    assert head.metadata == [("authorization", "Bearer x"), ("user-agent", "u")]
    assert (head.timeout_s, head.encoding) == (None, "identity")


def test_binary_metadata_is_decoded_with_padding_and_without():
    head = read_head(headers((b"a-bin", b"AP8"), (b"b-bin", b"AP8="), (b"c-bin", b"")))
    assert head.metadata == [("a-bin", b"\x00\xff"), ("b-bin", b"\x00\xff"), ("c-bin", b"")]


def test_binary_values_of_one_name_may_come_in_one_header():
    assert read_head(headers((b"a-bin", b"AP8,AAA="))).metadata == [
        ("a-bin", b"\x00\xff"),
        ("a-bin", b"\x00\x00"),
    ]


def test_metadata_that_is_not_base64_is_refused():
    with pytest.raises(Refused, match="'a-bin' is not base64"):
        read_head(headers((b"a-bin", b"AAAAA")))


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        ("1H", 3600),
        ("2M", 120),
        ("3S", 3),
        ("40m", 0.04),
        ("50u", 5e-5),
        ("60n", 6e-8),
        ("0S", 0),
        ("99999999H", 99_999_999 * 3600),
    ],
)
def test_a_timeout_has_a_unit(timeout, seconds):
    assert read_head(headers(grpc_timeout=timeout)).timeout_s == pytest.approx(seconds)


@pytest.mark.parametrize("timeout", ["S", "1", "1s", "-1S", "1.5S", "123456789S", "١S", "1 S"])
def test_a_timeout_that_is_none_is_refused(timeout):
    with pytest.raises(Refused, match="grpc-timeout"):
        read_head(headers(grpc_timeout=timeout))


def test_an_encoding_that_nobody_knows_is_refused_with_those_that_are_known():
    with pytest.raises(Refused, match="identity, deflate, gzip") as caught:
        read_head(headers(grpc_encoding="zstd"))
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("kind", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_content_types_may_say_more(kind):
    assert read_head(headers(content_type=kind)).path == "/test.Probe/Echo"


@pytest.mark.parametrize(
    ("replaced", "status"),
    [
        ({":method": "GET"}, 405),
        ({"content_type": "application/json"}, 415),
        ({"content_type": "application/grpc-web"}, 415),
        ({"content_type": ""}, 415),
    ],
)
def test_what_is_not_grpc_has_a_status_of_http(replaced, status):
    with pytest.raises(NotGrpc) as caught:
        read_head(headers(**replaced))
    assert caught.value.status == status


def test_bytes_that_are_no_text_do_no_harm():
    head = read_head([*headers(), (b":path", b"/\xff"), (b"x", b"\xff")])
    assert (head.path, head.metadata) == ("/\ufffd", [("x", "\xff")])


def test_messages_of_errors_are_quoted_where_they_have_to_be():
    ending = trailers(grpc.StatusCode.NOT_FOUND, "50% of “it”\n", [("a", "b"), ("c-bin", b"\xff")])
    assert ending == [
        (b"grpc-status", b"5"),
        (b"grpc-message", b"50%25 of %E2%80%9Cit%E2%80%9D%0A"),
        (b"a", b"b"),
        (b"c-bin", b"/w=="),
    ]


def test_a_message_that_is_no_unicode_does_not_keep_a_call_from_its_end():
    assert trailers(grpc.StatusCode.INTERNAL, "\ud800")[1] == (b"grpc-message", b"?")

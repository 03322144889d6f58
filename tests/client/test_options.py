"""Keywords of a call become one protobuf request."""

from __future__ import annotations

import pytest

from baton.v1 import inference_pb2
from client._options import GenerateOptions, build_request
from core.errors import InvalidArgument


def test_only_what_was_given_is_set():
    request, timeout_s = build_request("hi", {"max_tokens": 4, "temperature": None})
    assert request.prompt == "hi"
    assert request.sampling.HasField("max_tokens")
    assert not request.sampling.HasField("temperature")
    assert not request.HasField("token_ids")
    assert timeout_s is None


def test_zero_and_empty_input_are_sent_for_the_server_to_judge():
    request, _ = build_request("", {"token_ids": [], "max_tokens": 0, "temperature": 0.0})
    assert request.HasField("prompt") and request.HasField("token_ids")
    assert request.sampling.HasField("max_tokens") and request.sampling.HasField("temperature")


def test_lists_messages_and_names_arrive():
    messages = [{"role": "user", "content": "hi"}]
    options = {"messages": messages, "stop": ["a", "b"], "stop_token_ids": [5], "request_id": "r"}
    request, timeout_s = build_request(None, {**options, "model": "m", "timeout_s": 2.0})
    assert (request.messages[0].role, request.messages[0].content) == ("user", "hi")
    assert list(request.sampling.stop) == ["a", "b"]
    assert list(request.sampling.stop_token_ids) == [5]
    assert (request.request_id, request.model, timeout_s) == ("r", "m", 2.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 2**40),
        ("seed", -1),
        ("temperature", "hot"),
        ("token_ids", [1, 2**40]),
        ("messages", [{"speaker": "user"}]),
        ("timeout_s", 0.0),
        ("timeout_s", float("inf")),
        ("timeout_s", 1e300),
        ("request_id", "\ud800"),
    ],
)
def test_what_protobuf_cannot_carry_is_refused_by_name(field, value):
    with pytest.raises(InvalidArgument, match=field) as caught:
        build_request(None, {field: value})
    assert caught.value.field == field


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="max_token"):
        build_request("hi", {"max_token": 3})


def test_none_is_the_same_as_leaving_an_option_out():
    request, timeout_s = build_request("hi", dict.fromkeys(GenerateOptions.__annotations__))
    assert (request, timeout_s) == (inference_pb2.GenerateRequest(prompt="hi"), None)


def test_one_stop_string_needs_no_list():
    request, _ = build_request("hi", {"stop": "END"})
    assert list(request.sampling.stop) == ["END"]

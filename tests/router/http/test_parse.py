"""Which bodies are taken, and how those that are not are refused."""

import json

import pytest
from pydantic import ValidationError

from router.http.errors import HttpError
from router.http.parameters import ChatBody, CompletionBody, TokenizeBody
from router.http.parse import parse_body

USER = {"role": "user", "content": "hi"}


def chat(**parameters):
    return parse_body(ChatBody, json.dumps({"messages": [USER]} | parameters).encode())


def completion(**parameters):
    return parse_body(CompletionBody, json.dumps({"prompt": "hi"} | parameters).encode())


def refusal(parse, **parameters):
    """Parameter, code and message of the error."""
    with pytest.raises(HttpError) as caught:
        parse(**parameters)
    assert caught.value.status == 400
    return caught.value.param, caught.value.code, caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("moderation", {}),
        ("reasoning_effort", "low"),
        ("verbosity", "high"),
        ("service_tier", "flex"),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("prompt_cache_options", {}),
        ("prompt_cache_retention", "24h"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, value):
    param, code, message = refusal(chat, **{name: value})
    assert (param, code) == (name, "unsupported_value")
    assert message.startswith(name)


def test_values_that_ask_for_nothing_are_taken():
    body = chat(
        tools=[],
        tool_choice="none",
        parallel_tool_calls=False,
        functions=[],
        response_format={"type": "text"},
        modalities=["text"],
        store=False,
        metadata={},
        service_tier="default",
        logprobs=False,
        top_logprobs=0,
        user="someone",
        prompt_cache_key="k",
    )
    assert body.user == "someone"
    assert completion(best_of=2, n=2, suffix="", echo=False).n == 2


def test_null_is_absent_everywhere():
    nothing = dict.fromkeys(ChatBody.model_fields.keys() - {"messages"})
    message = USER | {"name": None, "tool_calls": None}
    assert chat(**nothing, messages=[message]) == chat()
    assert chat(stream=True, stream_options={"include_usage": None}).stream_options is not None


def test_an_unknown_parameter_is_refused_by_name():
    assert refusal(chat, guided_json={}) == (
        "guided_json",
        "unknown_parameter",
        "unknown parameter: guided_json",
    )
    assert refusal(chat, messages=[USER | {"mood": "good"}]) == (
        "messages",
        "unknown_parameter",
        "unknown parameter: messages[0].mood",
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": "0.5"}, "temperature should be a valid number"),
        ({"n": True}, "n should be a valid integer"),
        ({"n": 1.5}, "n should be a valid integer"),
        ({"n": 2**31}, "n should be less than or equal to 2147483647"),
        ({"seed": 2**64}, "seed should be a valid integer"),
        ({"seed": -(2**63) - 1}, "seed should be a valid integer"),
        ({"stream": 1}, "stream should be a valid boolean"),
        ({"stop": [1]}, "stop[0] should be a valid string"),
        ({"logit_bias": {"x": 1}}, "logit_bias has the key 'x', which is no token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias has the key '-1', which is no token id"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias has two keys for one token id, with"),
        ({"logit_bias": [1]}, "logit_bias should be a valid dictionary"),
        ({"stream_options": {}}, "stream_options needs stream to be true"),
        ({"stream_options": True}, "stream_options should be a valid dictionary or instance"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0] should be less than or equal to"),
    ],
)
def test_a_wrong_value_is_refused_by_name(parameters, message):
    param, code, said = refusal(completion, **parameters)
    assert (param, code) == (next(iter(parameters)), "invalid_value")
    assert said.startswith(message)


@pytest.mark.parametrize(
    ("parse", "parameters", "message"),
    [
        (completion, {"best_of": 2}, "best_of is supported only when it equals n (1)"),
        (completion, {"max_tokens": 0}, "max_tokens must be at least 1; it may be 0 together"),
        (completion, {"suffix": "x"}, "suffix is supported only as ''"),
        (chat, {"top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
        (chat, {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens differs"),
        (chat, {"logprobs": 1}, "logprobs should be a valid boolean"),
    ],
)
def test_rules_between_parameters(parse, parameters, message):
    param, _, said = refusal(parse, **parameters)
    assert said.startswith(message)
    assert message.startswith(param)


@pytest.mark.parametrize("prompt", ["", [], [[]], [1, "a"], ["a", [1]], [1.5], [True], {}, 7])
def test_a_prompt_is_text_or_ids_or_a_list_of_one_kind(prompt):
    if prompt == "":
        assert completion(prompt=prompt).prompt == [""]  # judged with the other values
    else:
        assert refusal(completion, prompt=prompt)[0] == "prompt"


def test_a_missing_input_is_named():
    assert refusal(completion, prompt=None)[:2] == ("prompt", "missing_required_parameter")
    assert refusal(chat, messages=None)[:2] == ("messages", "missing_required_parameter")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], " must have at least 1 part"),
        ([{"type": "image_url", "image_url": {}}], "[0] has the type 'image_url'; only 'text'"),
        ([{"type": "text", "text": "a"}, {}], "[1] must be an object with a type"),
        ([{"type": "text"}], "[0] must have the keys type and text, and nothing else"),
        (7, " should be a valid string"),
        (None, " is missing"),
    ],
)
def test_content_is_text_or_parts_of_text(content, message):
    param, _, said = refusal(chat, messages=[{"role": "user", "content": content}])
    assert param == "messages"
    assert said.startswith("messages[0].content" + message)


def test_messages_of_tools_and_unknown_roles_are_refused():
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    assert refusal(chat, messages=[call])[2] == (
        "messages[0].tool_calls is supported only when it is empty"
    )
    said = refusal(chat, messages=[USER | {"role": "critic"}])[2]
    assert said.startswith("messages[0].role is supported only as 'developer', 'system', 'user'")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"a":NaN}', b'"\xff"', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(HttpError) as caught:
        parse_body(ChatBody, body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_tokenize_takes_a_prompt_or_messages():
    for both in ({}, {"prompt": "a", "messages": [USER]}):
        with pytest.raises(HttpError, match="prompt must be given, or messages, and not both"):
            parse_body(TokenizeBody, json.dumps(both).encode())


def test_what_would_be_dropped_or_refused_as_a_prompt_is_refused_by_tokenize():
    def tokenize(**parameters):
        return parse_body(TokenizeBody, json.dumps(parameters).encode())

    param, _, message = refusal(tokenize, messages=[USER], add_special_tokens=False)
    assert (param, message.split(":")[0]) == (
        "add_special_tokens",
        "add_special_tokens is of prompts",
    )
    assert refusal(tokenize, messages=[])[0] == "messages"


def test_a_name_of_any_length_is_shown_in_part():
    param, _, message = refusal(chat, **{"x" * 100_000: 1})
    assert param == "x" * 64 + "..."
    assert message == "unknown parameter: " + param
    assert len(refusal(chat, messages=[USER | {"x" * 100_000: 1}])[2]) < 120


def test_a_thousand_wrong_messages_cost_no_more_than_the_first():
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"messages": [{}] * 1000})
    assert {error["loc"][:2] for error in caught.value.errors()} == {("messages", 0)}

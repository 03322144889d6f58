import math
from dataclasses import replace

import pytest

from baton.v1 import inference_pb2, types_pb2
from core.errors import InvalidArgument
from core.model_folder import DefaultSampling
from router.validate import (
    ModelLimits,
    check_defaults,
    check_prompt,
    check_request,
    check_request_id,
)

LIMITS = ModelLimits(
    served_name="tiny",
    vocab_size=100,
    max_model_len=32,
    eos_token_ids=(2,),
    defaults=DefaultSampling(),
)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_defaults_of_the_model_keep_the_same_rules(field):
    check_defaults(LIMITS)
    limits = replace(LIMITS, defaults=DefaultSampling(**{field: -1.0}))
    with pytest.raises(InvalidArgument, match=f"^{field} must be "):
        check_defaults(limits)


def request(text="hello", **fields):
    sampling = types_pb2.SamplingParams(**fields)
    return inference_pb2.GenerateRequest(prompt=text, sampling=sampling)


def refusal(wrong, num_prompt=None):
    """The error for a request, checked as far as needed."""
    with pytest.raises(InvalidArgument) as caught:
        check_request(wrong, LIMITS)
        token_ids = list(wrong.token_ids.ids) or [5] * (num_prompt or 3)
        check_prompt(wrong, token_ids, LIMITS)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_tokens", 0, "from 1 to 32, got 0"),
        ("max_tokens", -4, "from 1 to 32, got -4"),
        ("max_tokens", 2**31 - 1, "from 1 to 32, got 2.14748e+09"),
        ("min_tokens", -1, "from 0 to 32, got -1"),
        ("temperature", math.nan, "from 0 to 100.0, got nan"),
        ("temperature", math.inf, "from 0 to 100.0, got inf"),
        ("temperature", -0.5, "from 0 to 100.0, got -0.5"),
        ("temperature", 101.0, "from 0 to 100.0, got 101"),
        ("top_p", 0.0, "greater than 0 and at most 1, got 0"),
        ("top_p", 1.5, "greater than 0 and at most 1, got 1.5"),
        ("top_p", math.nan, "greater than 0 and at most 1, got nan"),
        ("top_k", -1, "from 0 to"),
        ("min_p", -0.25, "from 0 to 1, got -0.25"),
        ("min_p", math.nan, "from 0 to 1, got nan"),
        ("repetition_penalty", 0.0, "greater than 0 and at most 100.0, got 0"),
        ("repetition_penalty", math.nan, "got nan"),
        ("presence_penalty", 2.5, "from -2.0 to 2.0, got 2.5"),
        ("frequency_penalty", -math.inf, "from -2.0 to 2.0, got -inf"),
        ("logprobs", -1, "from 0 to 20, got -1"),
        ("logprobs", 21, "from 0 to 20, got 21"),
    ],
)
def test_a_sampling_field_out_of_range_is_named_with_limit_and_value(field, value, limit):
    error = refusal(request(**{field: value}))
    assert error.field == field
    assert error.message.startswith(f"{field} must be ")
    assert limit in error.message


@pytest.mark.parametrize(
    ("stops", "problem"),
    [
        (["x"] * 17, "stop has 17 strings; the limit is 16"),
        (["ok", ""], r"stop[1] has 0 characters; it needs 1 to 256"),
        (["x" * 257], r"stop[0] has 257 characters; it needs 1 to 256"),
    ],
)
def test_too_many_or_too_long_stop_strings_are_refused(stops, problem):
    error = refusal(request(stop=stops))
    assert (error.field, error.message) == ("stop", problem)


def test_stop_token_ids_are_few_and_of_the_vocabulary():
    assert "the limit is 256" in refusal(request(stop_token_ids=[1] * 257)).message
    error = refusal(request(stop_token_ids=[1, 100]))
    assert error.field == "stop_token_ids"
    assert "stop_token_ids[1] is 100, outside the vocabulary of 100 tokens" in error.message


@pytest.mark.parametrize("token_id", [-1, 100, 2**31 - 1])
def test_a_token_id_outside_the_vocabulary_is_named_with_its_place(token_id):
    wrong = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[99, token_id]))
    error = refusal(wrong)
    assert error.field == "token_ids"
    assert f"token_ids[1] is {token_id}, outside the vocabulary" in error.message


def test_a_text_with_tokens_that_the_model_lacks_is_refused():
    with pytest.raises(InvalidArgument, match=r"prompt\[1\] is 100, outside the vocabulary"):
        check_prompt(request(), [5, 100], LIMITS)


def test_too_many_token_ids_are_counted_but_not_looked_at():
    wrong = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[-1] * 32))
    with pytest.raises(InvalidArgument, match="token_ids has 32 tokens or more; the limit is 31"):
        check_request(wrong, LIMITS)


def test_too_many_messages_are_refused():
    messages = [inference_pb2.ChatMessage(role="user")] * 4097
    error = refusal(inference_pb2.GenerateRequest(messages=messages))
    assert (error.field, error.message) == (
        "messages",
        "messages has 4097 entries; the limit is 4096",
    )


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({}, "prompt", "got none"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"token_ids": inference_pb2.TokenIds()}, "token_ids", "token_ids is empty"),
        (
            {"prompt": "a", "token_ids": inference_pb2.TokenIds(ids=[1])},
            "prompt",
            "got prompt and token_ids",
        ),
        (
            {"prompt": "", "messages": [inference_pb2.ChatMessage(role="user")]},
            "prompt",
            "got prompt and messages",
        ),
        (
            {"messages": [inference_pb2.ChatMessage(content="a")]},
            "messages",
            "messages[0].role is empty",
        ),
    ],
)
def test_exactly_one_input_that_is_not_empty_is_needed(fields, field, problem):
    error = refusal(inference_pb2.GenerateRequest(**fields))
    assert error.field == field
    assert problem in error.message


def test_an_unknown_model_is_refused_with_the_served_one():
    wrong = request()
    wrong.model = "gpt" * 50
    error = refusal(wrong)
    assert error.field == "model"
    assert error.message.endswith("is unknown; this deployment serves 'tiny'")
    assert len(error.message) < 200


def test_the_served_models_name_is_accepted():
    right = request()
    right.model = "tiny"
    check_request(right, LIMITS)


def test_a_request_over_the_size_limit_is_refused():
    error = refusal(request("x" * (4 << 20)))
    assert error.field == "prompt"
    assert "the limit is 4194304" in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 0), ("n", 129), ("priority", 1001), ("prompt_logprobs", -1), ("prompt_logprobs", 21)],
)
def test_a_request_wide_number_out_of_range_is_refused(field, value):
    assert refusal(inference_pb2.GenerateRequest(prompt="a", **{field: value})).field == field


@pytest.mark.parametrize("bias", [{-1: 0.0}, {100: 0.0}, {1: 101.0}, {1: float("nan")}])
def test_a_logit_bias_out_of_range_is_refused(bias):
    assert refusal(request(logit_bias=bias)).field == "logit_bias"


def test_a_prompt_over_the_context_length_is_refused():
    error = refusal(request(), num_prompt=32)
    assert error.field == "prompt"
    assert "prompt has 32 tokens or more; the limit is 31" in error.message


def test_prompt_and_max_tokens_must_fit_the_context_together():
    error = refusal(request(max_tokens=13), num_prompt=20)
    assert error.field == "max_tokens"
    assert "max_tokens is 13 and prompt has 20 tokens" in error.message
    assert "the context length 32" in error.message


def test_min_tokens_may_not_exceed_max_tokens():
    error = refusal(request(min_tokens=5, max_tokens=4))
    assert error.field == "min_tokens"
    assert "between 0 and max_tokens (4), got 5" in error.message


def test_an_input_without_tokens_is_empty():
    with pytest.raises(InvalidArgument, match="prompt is empty"):
        check_prompt(request(), [], LIMITS)


@pytest.mark.parametrize("request_id", ["x" * 129, "a b", "a\n", "é"])
def test_a_request_id_is_short_visible_ascii(request_id):
    with pytest.raises(InvalidArgument) as caught:
        check_request_id(request_id)
    assert caught.value.field == "request_id"


@pytest.mark.parametrize("request_id", ["", "x" * 128, "a/b:c-1"])
def test_ordinary_request_ids_are_accepted(request_id):
    check_request_id(request_id)

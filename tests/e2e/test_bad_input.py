"""Wrong requests get INVALID_ARGUMENT with the field named; nothing leaks; others go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from core.errors import ERROR_METADATA_KEY
from tests import tiny_models
from tests.e2e.conftest import Reference
from tests.e2e.stack import RunningStack, running_stack
from tests.engine.harness import make_prompt

pytestmark = pytest.mark.e2e

CONTEXT = 512
NAN = float("nan")


@pytest.fixture(scope="module")
def served(tiny) -> Iterator[tuple[RunningStack, Reference]]:  # type: ignore[no-untyped-def]
    folder, reference = tiny("llama")
    # A pool that holds less than the context: 25 blocks of 16 tokens, so 400.
    small = "--decode-args=--num-gpu-blocks-override 25"
    with running_stack(folder, "--kv-transport", "tcp", small) as stack:
        yield stack, reference


def request(**fields: object) -> inference_pb2.GenerateRequest:
    """A good request with some fields replaced; `sampling` fields are given directly."""
    names = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    sampling = {name: value for name, value in fields.items() if name in names}
    others = {name: value for name, value in fields.items() if name not in names}
    if not {"prompt", "messages", "token_ids"} & others.keys():
        others["token_ids"] = inference_pb2.TokenIds(ids=make_prompt(20))
    others["sampling"] = types_pb2.SamplingParams(**{"max_tokens": 4, **sampling})  # type: ignore[arg-type]
    return inference_pb2.GenerateRequest(**others)  # type: ignore[arg-type]


def ids(*values: int) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=values)


BAD = {
    "empty prompt": (request(prompt=""), "prompt", "empty"),
    "no token ids": (request(token_ids=ids()), "token_ids", "empty"),
    "no input": (inference_pb2.GenerateRequest(), "prompt", "exactly one"),
    "two inputs": (request(prompt="a", token_ids=ids(1)), "prompt", "exactly one"),
    "prompt over the pool": (request(token_ids=ids(*[1] * 450)), "token_ids", "400"),
    "prompt over the context": (request(token_ids=ids(*[1] * 600)), "token_ids", "400"),
    "prompt plus max_tokens over it": (request(max_tokens=390), "max_tokens", "400"),
    "negative max_tokens": (request(max_tokens=-1), "max_tokens", "-1"),
    "zero max_tokens": (request(max_tokens=0), "max_tokens", "0"),
    "absurd max_tokens": (request(max_tokens=2**31 - 1), "max_tokens", "400"),
    "NaN temperature": (request(temperature=NAN), "temperature", "nan"),
    "negative temperature": (request(temperature=-0.1), "temperature", "-0.1"),
    "infinite temperature": (request(temperature=float("inf")), "temperature", "inf"),
    "top_p of zero": (request(top_p=0.0), "top_p", "0"),
    "top_p over one": (request(top_p=1.5), "top_p", "1"),
    "NaN top_p": (request(top_p=NAN), "top_p", "nan"),
    "negative top_k": (request(top_k=-1), "top_k", "-1"),
    "min_p over one": (request(min_p=1.1), "min_p", "1"),
    "NaN repetition_penalty": (request(repetition_penalty=NAN), "repetition_penalty", "nan"),
    "presence_penalty": (request(presence_penalty=2.5), "presence_penalty", "2.5"),
    "min_tokens over max_tokens": (request(min_tokens=5), "min_tokens", "4"),
    "token outside the vocabulary": (request(token_ids=ids(1, 288)), "token_ids", "288"),
    "negative token": (request(token_ids=ids(-1)), "token_ids", "-1"),
    "stop token outside it": (request(stop_token_ids=[999]), "stop_token_ids", "999"),
    "too many logprobs": (request(logprobs=1000), "logprobs", "20"),
    "too many stop strings": (request(stop=["x"] * 17), "stop", "16"),
    "a too long stop string": (request(stop=["x" * 257]), "stop", "256"),
    "an empty stop string": (request(stop=[""]), "stop", "0 characters"),
    "no choices": (request(n=0), "n", "got 0"),
    "bias of no token": (request(logit_bias={288: 1.0}), "logit_bias", "288"),
    "unknown model": (request(model="gpt-9"), "model", "gpt-9"),
    "long request id": (request(request_id="x" * 129), "request_id", "128"),
    "1 MB of garbage": (request(prompt="\x00\ufffd%" * 350_000), "prompt", "400"),
    "over the size limit": (request(prompt="x" * 6_000_000), "prompt", str(4 << 20)),
}


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_with_the_field_and_the_limit(
    served: tuple[RunningStack, Reference], name: str
) -> None:
    message, field, hint = BAD[name]
    detail = refused(served[0], message, grpc.StatusCode.INVALID_ARGUMENT)
    assert detail.field == field
    assert hint in detail.message
    assert not detail.retryable


def test_good_requests_among_bad_ones_are_right_and_nothing_leaks(
    served: tuple[RunningStack, Reference],
) -> None:
    stack, reference = served
    for message, _, _ in BAD.values():
        refused(stack, message, grpc.StatusCode.INVALID_ARGUMENT)
    prompt = make_prompt(37)
    assert stack.greedy(prompt, 12).token_ids == reference(prompt, 12)
    stack.wait_until_idle()


def test_a_request_as_large_as_the_pool_is_served(
    served: tuple[RunningStack, Reference],
) -> None:
    stack, reference = served
    prompt = make_prompt(390)
    assert stack.greedy(prompt, 10).token_ids == reference(prompt, 10)


def refused(
    stack: RunningStack, message: inference_pb2.GenerateRequest, code: grpc.StatusCode
) -> types_pb2.ErrorDetail:
    """The error detail of a request that must fail with `code`."""
    with grpc.insecure_channel(stack.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=30)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is code, caught.value.details()
    trailer = dict(caught.value.trailing_metadata())
    return types_pb2.ErrorDetail.FromString(trailer[ERROR_METADATA_KEY])


def test_the_tiny_model_has_the_context_that_these_tests_assume(
    served: tuple[RunningStack, Reference], tmp_path: Path
) -> None:
    assert served[0].client().model().max_model_len == 400
    config = tiny_models.random_model(tiny_models.VARIANTS["llama"]).config
    assert config.max_position_embeddings == CONTEXT

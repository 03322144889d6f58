"""What is not given is filled in; what is given stays."""

from core.model_folder import DefaultSampling
from core.sampling import SamplingParams
from router.resolve import complete_request
from router.validate import ModelLimits, ResolvedRequest, check_request
from tests.router.test_validate import request


def test_what_is_not_given_takes_the_models_defaults():
    limits = ModelLimits("tiny", 100, 32, (2, 3), DefaultSampling(0.7, 0.9, 40, 0.1, 1.1))
    resolved = complete_request(request(), [5] * 10, limits, drawn_seed=9)
    assert resolved == ResolvedRequest(
        prompt_token_ids=(5,) * 10,
        sampling=SamplingParams(
            max_tokens=22,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            seed=9,
            repetition_penalty=1.1,
            eos_token_ids=(2, 3),
        ),
        stop=(),
    )


def test_what_is_given_comes_before_the_defaults_even_when_it_is_zero():
    limits = ModelLimits("tiny", 100, 32, (2,), DefaultSampling(0.7, 0.9, 40, 0.1, 1.1))
    given = request(
        max_tokens=22,
        min_tokens=2,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        repetition_penalty=1.0,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        stop=["x"],
        stop_token_ids=[7],
        ignore_eos=True,
        logprobs=0,
    )
    check_request(given, limits)
    resolved = complete_request(given, [5] * 10, limits, drawn_seed=9)
    assert resolved.stop == ("x",)
    assert resolved.sampling == SamplingParams(
        max_tokens=22,
        min_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        stop_token_ids=(7,),
        logprobs=0,
    )

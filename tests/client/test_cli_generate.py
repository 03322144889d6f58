"""`baton generate`: what it sends, what it prints, how it fails."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest

from baton.v1 import inference_pb2
from client.cli import main
from core.errors import InvalidArgument
from tests.client.conftest import PARIS, two_answers


def generate(router, *args: str) -> int:
    return main(["generate", "--server", router.address, *args])


def test_text_is_streamed_and_ends_with_a_newline(router, capsys):
    assert generate(router, "--prompt", "Where?") == 0
    assert capsys.readouterr().out == "Paris.\n"
    assert router.requests[0].prompt == "Where?"


def test_json_has_exactly_the_documented_shape(router, capsys):
    assert generate(router, "--prompt", "Where?", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "Paris.",
        "token_ids": [7, 8, 9],
        "prompt_tokens": 5,
        "finish_reason": "stop",
        "timing": {"ttft_s": 0.25, "total_s": 0.5},
        "route": {
            "prefill_worker": "prefill-0",
            "decode_worker": "decode-0",
            "cached_tokens": 16,
            "transferred_blocks": 2,
        },
    }


@pytest.mark.parametrize(("flags", "printed"), [([], b"?\n"), (["--json"], b'"text": "\\u00e9"')])
def test_output_that_cannot_show_a_character_is_no_failure(router, monkeypatch, flags, printed):
    last = inference_pb2.GenerateResponse()
    last.CopyFrom(PARIS[1])
    last.text = "é"
    router.responses = [last]
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert generate(router, "--prompt", "Where?", *flags) == 0
    assert printed in stdout.buffer.getvalue()


def test_logprobs_are_in_the_json_when_they_came(router, capsys):
    entry = router.responses[1].logprobs.add(logprob=-0.5)
    entry.top.add(token_id=9, logprob=-0.5)
    assert generate(router, "--prompt", "x", "--json", "--logprobs", "1") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["logprobs"] == [{"logprob": -0.5, "top": [[9, -0.5]]}]


def test_several_answers_are_printed_one_after_the_other(router, capsys):
    router.responses = two_answers()
    assert generate(router, "--prompt", "x", "-n", "2") == 0
    assert capsys.readouterr().out == "[0] a b\n[1] c\n"


def test_several_answers_and_the_prompts_log_probabilities_are_in_the_json(router, capsys):
    router.responses = two_answers()
    flags = ("--json", "-n", "2", "--prompt-logprobs", "0")
    assert generate(router, "--prompt", "x", *flags) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["text"] == "a b"
    assert printed["choices"] == [
        {"text": "a b", "token_ids": [97, 98], "finish_reason": "stop"},
        {"text": "c", "token_ids": [99], "finish_reason": "length"},
    ]
    assert [entry["logprob"] for entry in printed["prompt_logprobs"]] == [-1.5, -0.5]
    assert (router.requests[0].n, router.requests[0].prompt_logprobs) == (2, 0)


def test_every_sampling_flag_arrives(router):
    flags = "--max-tokens 5 --min-tokens 1 --temperature 0.5 --top-p 0.25 --top-k 7 --min-p 0.125"
    flags += " --seed 9 --repetition-penalty 1.5 --presence-penalty -1 --frequency-penalty 2"
    flags += " --stop END --stop STOP --stop-token-id 3 --ignore-eos --logprobs 2"
    assert generate(router, "--prompt", "x", "--request-id", "r", *flags.split()) == 0
    assert router.requests[0].request_id == "r"
    assert (
        router.requests[0].sampling
        == inference_pb2.GenerateRequest(
            sampling={
                "max_tokens": 5,
                "min_tokens": 1,
                "temperature": 0.5,
                "top_p": 0.25,
                "top_k": 7,
                "min_p": 0.125,
                "seed": 9,
                "repetition_penalty": 1.5,
                "presence_penalty": -1,
                "frequency_penalty": 2,
                "stop": ["END", "STOP"],
                "stop_token_ids": [3],
                "ignore_eos": True,
                "logprobs": 2,
            }
        ).sampling
    )


def test_chat_sends_the_prompt_as_a_users_message(router):
    assert generate(router, "--prompt", "Who?", "--chat") == 0
    request = router.requests[0]
    assert not request.HasField("prompt")
    assert [(message.role, message.content) for message in request.messages] == [("user", "Who?")]


def test_the_prompt_comes_unchanged_from_a_file_or_stdin(router, tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_bytes("é\r\n".encode())
    assert generate(router, "--prompt-file", str(path)) == 0
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"from stdin\n")))
    assert generate(router, "-") == 0
    assert [request.prompt for request in router.requests] == ["é\r\n", "from stdin\n"]


def test_messages_come_from_a_json_file(router, tmp_path):
    path = tmp_path / "messages.json"
    path.write_text('[{"role": "system", "content": "Be brief."}]')
    assert generate(router, "--messages", str(path)) == 0
    assert router.requests[0].messages[0].role == "system"


def test_a_refusal_is_one_line_on_stderr_and_exit_code_1(router, capsys):
    router.responses = []
    router.error = InvalidArgument("max_tokens must be over 0, not 0", field="max_tokens")
    assert generate(router, "--prompt", "x", "--max-tokens", "0") == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: max_tokens must be over 0, not 0\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompt-file", "/does/not/exist"), "prompt: cannot read /does/not/exist"),
        (("--messages", "/does/not/exist"), "messages: cannot read /does/not/exist"),
        (("--prompt", "x", "--max-tokens", "99999999999"), "max_tokens: "),
    ],
)
def test_bad_input_is_refused_before_a_call(router, capsys, args, message):
    assert generate(router, *args) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert router.requests == []


def test_a_server_that_is_away_is_one_line(capsys):
    assert main(["generate", "--server", "127.0.0.1:1", "--prompt", "x"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot reach 127.0.0.1:1: ") and error.count("\n") == 1


@pytest.mark.parametrize("args", [[], ["--prompt", "a", "--messages", "b"], ["--prompt"]])
def test_wrong_usage_ends_with_exit_code_2(args, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["generate", *args])
    assert caught.value.code == 2


def test_ctrl_c_is_quiet_and_cancels(router, capsys, monkeypatch):
    router.hangs = True

    def interrupt(text: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdout, "write", interrupt)
    assert generate(router, "--prompt", "x") == 130
    assert capsys.readouterr().err == ""
    assert router.call_ended.wait(30)

"""`baton generate`: one prompt in, its continuation out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, cast

from client._arguments import Subcommands, add_server, api_key, positive_int, seconds
from client._options import GenerateOptions
from client._results import Choice, Completion
from client._sync import BatonClient
from core.errors import InvalidArgument

_SAMPLING = (
    ("--max-tokens", int, "N", "stop after N tokens [as many as fit the context]"),
    ("--min-tokens", int, "N", "do not stop before N tokens"),
    ("--temperature", float, "T", "0 always takes the likeliest token"),
    ("--top-p", float, "P", "sample from the likeliest tokens that hold P of the probability"),
    ("--top-k", int, "K", "sample from the K likeliest tokens; 0 is off"),
    ("--min-p", float, "P", "drop tokens less likely than P times the likeliest"),
    ("--seed", int, "N", "the same seed gives the same tokens"),
    ("--repetition-penalty", float, "X", "over 1: make tokens of prompt and output rarer"),
    ("--presence-penalty", float, "X", "over 0: make tokens of the output rarer"),
    ("--frequency-penalty", float, "X", "the same, in proportion to how often they came"),
    ("--logprobs", int, "N", "with --json: log-probabilities, and those of the N likeliest"),
)
_SAMPLING_NAMES = tuple(flag.removeprefix("--").replace("-", "_") for flag, *_ in _SAMPLING)


def add_command(commands: Subcommands) -> None:
    """Adds `generate` to the command line."""
    parser = commands.add_parser(
        "generate",
        help="generate text from a prompt",
        description="Streams the text that a prompt leads to. What is not given takes the "
        "model's own default.",
    )
    add_server(parser)
    source = parser.add_argument_group("input, one of").add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    source.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file, taken as it is")
    source.add_argument("--messages", metavar="FILE", help='JSON: [{"role": …, "content": …}, …]')
    source.add_argument(
        "stdin", metavar="-", nargs="?", choices=["-"], help="read the prompt from stdin"
    )
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--model", metavar="NAME", help="refuse to be served by another model")
    parser.add_argument("--request-id", metavar="ID", help="a repeated call with this id joins in")
    parser.add_argument(
        "-n", metavar="N", type=positive_int, help="answers to the prompt, which is computed once"
    )
    parser.add_argument(
        "--prompt-logprobs",
        metavar="N",
        type=int,
        help="with --json: the prompt's log-probabilities, and those of the N likeliest",
    )
    parser.add_argument("--timeout", metavar="S", type=seconds, help="give up after S s")
    sampling = parser.add_argument_group("sampling")
    for flag, kind, metavar, text in _SAMPLING:
        sampling.add_argument(flag, type=kind, metavar=metavar, help=text)
    sampling.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="stop before TEXT; repeatable"
    )
    sampling.add_argument(
        "--stop-token-id",
        metavar="ID",
        action="append",
        type=int,
        default=[],
        help="stop at this token; repeatable",
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="go on after the model's end-of-text token"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Streams the text, or prints the whole as JSON."""
    prompt, options = _request(args)
    with BatonClient(args.server, api_key()) as client, client.stream(prompt, **options) as stream:
        if args.json:
            is_utf8 = sys.stdout.encoding.lower() == "utf-8"
            print(json.dumps(as_json(stream.completion()), ensure_ascii=not is_utf8))
            return 0
        if args.n is not None and args.n > 1:
            # They come at once, so each is printed whole.
            for number, choice in enumerate(stream.completion().choices):
                sys.stdout.write(f"[{number}] {choice.text}\n")
            return 0
        for chunk in stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        stream.completion()  # raises when the end is missing
    sys.stdout.write("\n")
    return 0


def as_json(completion: Completion) -> dict[str, Any]:
    """What `--json` prints: of the first answer and, with several, of each in `choices`.

    Log-probabilities are there only where they were asked for.
    """
    route, timing = completion.route, completion.timing
    result: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": completion.usage.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "timing": dataclasses.asdict(timing),
        "route": {
            "prefill_worker": route.prefill_worker,
            "decode_worker": route.decode_worker,
            "cached_tokens": route.cached_tokens,
            "transferred_blocks": route.transferred_blocks,
        },
    }
    if completion.logprobs:
        result["logprobs"] = [dataclasses.asdict(entry) for entry in completion.logprobs]
    if completion.prompt_logprobs:
        entries = [dataclasses.asdict(entry) for entry in completion.prompt_logprobs]
        result["prompt_logprobs"] = entries
    if len(completion.choices) > 1:
        result["choices"] = [_choice_as_json(choice) for choice in completion.choices]
    return result


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    result = dataclasses.asdict(choice)
    if not choice.logprobs:
        del result["logprobs"]
    return result


def _request(args: argparse.Namespace) -> tuple[str | None, GenerateOptions]:
    options: dict[str, Any] = {name: getattr(args, name) for name in _SAMPLING_NAMES}
    options |= {
        "stop": args.stop,
        "stop_token_ids": args.stop_token_id,
        "ignore_eos": args.ignore_eos,
        "timeout_s": args.timeout,
        "model": args.model,
        "request_id": args.request_id,
        "n": args.n,
        "prompt_logprobs": args.prompt_logprobs,
    }
    prompt = None
    if args.messages is not None:
        options["messages"] = _read_messages(args.messages)
    else:
        prompt = _read_prompt(args)
        if args.chat:
            options["messages"] = [{"role": "user", "content": prompt}]
            prompt = None
    return prompt, cast(GenerateOptions, options)


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return str(args.prompt)
    if args.prompt_file is not None:
        return _read_file(args.prompt_file, "prompt")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"prompt: stdin is not UTF-8: {error}", field="prompt") from None


def _read_file(name: str, field: str) -> str:
    try:
        return Path(name).read_bytes().decode()
    except OSError as error:
        raise InvalidArgument(
            f"{field}: cannot read {name}: {error.strerror}", field=field
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{field}: {name} is not UTF-8: {error}", field=field) from None


def _read_messages(name: str) -> list[dict[str, str]]:
    try:
        messages = json.loads(_read_file(name, "messages"))
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"messages: {name} is not JSON: {error}", field="messages") from None
    if not isinstance(messages, list) or not all(isinstance(entry, dict) for entry in messages):
        raise InvalidArgument(f"messages: {name} holds no list of objects", field="messages")
    return messages

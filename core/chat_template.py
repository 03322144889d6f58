"""A model folder's chat template: messages to one prompt text.

The template language is Hugging Face's: Jinja in a sandbox, with a few names of its own
(`raise_exception`, `strftime_now`, a `tojson` that keeps non-ASCII, the `generation` tag).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import InvalidArgument, StartupError
from core.model_folder import read_json

_MAX_REASON_CHARS = 200


class Message(Protocol):
    """What a template is shown of a message."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


@dataclass(frozen=True)
class ChatMessage:
    role: str
    content: str


class ChatTemplate:
    """A compiled template and the special tokens that it may write."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        self._template = _environment().from_string(source)
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The folder's template, or None when it has none. Raises StartupError."""
        config_file = folder / "tokenizer_config.json"
        config = read_json(config_file) if config_file.is_file() else {}
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            source: str | None = template_file.read_text(encoding="utf-8")
        else:
            source = _default_template(config.get("chat_template"))
        if source is None:
            return None
        try:
            return cls(source, _special_tokens(folder, config))
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"chat template of {folder} is broken: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt, up to where the assistant begins. Raises InvalidArgument."""
        try:
            return self._template.render(
                messages=[{"role": item.role, "content": item.content} for item in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            # A template's own words may quote the message at any length.
            reason = str(error)[:_MAX_REASON_CHARS]
            raise InvalidArgument(
                f"messages: the model's chat template refuses them: {reason}", field="messages"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text; here it is only text."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _default_template(value: Any) -> str | None:
    """`chat_template` is one template, or a list of named ones."""
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        return named.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like, by name."""
    map_file = folder / "special_tokens_map.json"
    entries = (read_json(map_file) if map_file.is_file() else {}) | config
    tokens: dict[str, str] = {}
    for name, value in entries.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens

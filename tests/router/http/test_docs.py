"""docs/api.md and the code tell the same, and both know all that OpenAI's client can send."""

import re
from pathlib import Path

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from router.http.errors import CLIENT_LEFT
from router.http.parameters import ChatBody, CompletionBody, GenerationBody

METRICS = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
PAGE = (Path(__file__).parents[3] / "docs/api.md").read_text()


def first_column(heading):
    """Code in the first cells of the table under `heading`."""
    section = re.split(r"^#+ ", PAGE.split(f"# {heading}\n")[1], flags=re.MULTILINE)[0]
    return re.findall(r"^\| `([^`]+)`", section, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "fields"),
    [
        ("Of both", GenerationBody.model_fields.keys()),
        ("Of completions", CompletionBody.model_fields.keys() - GenerationBody.model_fields),
        ("Of chat completions", ChatBody.model_fields.keys() - GenerationBody.model_fields),
    ],
)
def test_the_tables_list_every_parameter(heading, fields):
    listed = first_column(heading)
    assert len(listed) == len(set(listed))
    assert set(listed) == set(fields)


@pytest.mark.parametrize(
    ("body", "official"), [(CompletionBody, CompletionParams), (ChatBody, ChatParams)]
)
def test_every_parameter_of_openais_client_is_known(body, official):
    assert official.__annotations__.keys() | {"stream"} <= body.model_fields.keys()


async def test_the_table_of_metrics_is_whole(serve):
    async with serve() as s:
        text = (await s.http.get("/metrics")).text
    found = re.findall(r"^# TYPE (\w+) (?:counter|histogram|gauge)$", text, flags=re.MULTILINE)
    listed = re.findall(r"^\| `(\w+)` \|", METRICS.split("## Workers")[0], flags=re.MULTILINE)
    assert {name for name in found if not name.endswith("_created")} == set(listed)
    assert str(CLIENT_LEFT) in METRICS

"""A tenant over its quota, over HTTP and real processes."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest

from tests.e2e.stack import running_stack

pytestmark = pytest.mark.e2e

TENANTS = """
tenants:
  acme: {keys: [sk-acme], requests_per_s: 0.5}
  zeta: {keys: [sk-zeta]}
default: {class: bronze}
"""


def ask(client: openai.OpenAI) -> int:
    """Tokens of one completion."""
    answer = client.completions.create(
        model="", prompt=[1, 2, 3], max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens


def ask_until_refused(client: openai.OpenAI) -> openai.RateLimitError:
    """The first is within the quota, the second only if it comes two seconds later."""
    for _ in range(20):
        try:
            assert ask(client) == 4
        except openai.RateLimitError as error:
            return error
    raise AssertionError("never over its quota")


def test_over_its_quota_a_tenant_is_told_when_to_come_back_and_then_served(
    tiny,  # type: ignore[no-untyped-def]
    tmp_path: Path,
) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    args = ("--dtype", "float32", "--http-port", "0", f"--router-args=--tenants {path}")
    with running_stack(tiny("llama")[0], *args, local_prefill=None) as stack:

        def client(key: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=f"http://{stack.http}/v1", api_key=key, max_retries=0)

        with client("sk-acme") as acme, client("sk-zeta") as zeta:
            assert ask(acme) == 4
            refused = ask_until_refused(acme)
            assert (refused.status_code, refused.param) == (429, "requests_per_s")
            assert "tenant acme is over its quota" in str(refused)
            assert [ask(zeta) for _ in range(3)] == [4, 4, 4]
            wait_s = int(refused.response.headers["retry-after"])
            assert 1 <= wait_s <= 2
            time.sleep(wait_s)
            assert ask(acme) == 4

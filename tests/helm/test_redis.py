"""Redis, in the release or outside of it."""

from __future__ import annotations

import pytest

from tests.helm.rendering import environment, render

CLIENTS = ("router", "prefill", "decode")
OUTSIDE = ("redis.enabled=false", "redis.external.url=rediss://redis.example.com/0")


@pytest.mark.parametrize("component", CLIENTS)
def test_everybody_uses_the_releases_own(component):
    assert render().settings(component)["BATON_REDIS_URL"] == "redis://chat-baton-redis:6379/0"


def test_it_keeps_nothing_on_disk_and_refuses_rather_than_evicts():
    args = render("redis.maxMemory=2gb").pod("redis", "StatefulSet")["containers"][0]["args"]
    options = dict(zip(args[::2], args[1::2], strict=True))
    assert options == {
        "--dir": "/tmp",
        "--save": "",
        "--appendonly": "no",
        "--maxmemory": "2gb",
        "--maxmemory-policy": "noeviction",
    }


@pytest.mark.parametrize("component", CLIENTS)
def test_another_redis_replaces_it(component):
    rendering = render(*OUTSIDE)
    assert rendering.settings(component)["BATON_REDIS_URL"] == "rediss://redis.example.com/0"
    assert rendering.names("StatefulSet") == []
    assert "chat-baton-redis" not in rendering.names("Service")


@pytest.mark.parametrize("component", [*CLIENTS, "adapter"])
def test_a_url_with_a_password_comes_from_a_secret(component):
    rendering = render("redis.enabled=false", "redis.external.urlSecret.name=redis")
    url = environment(rendering.container(component))["BATON_REDIS_URL"]
    assert url == {"secretKeyRef": {"name": "redis", "key": "url"}}
    if component in CLIENTS:
        assert "BATON_REDIS_URL" not in rendering.settings(component)

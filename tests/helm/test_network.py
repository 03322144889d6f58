"""Who may reach whom."""

from __future__ import annotations

from tests.helm.rendering import environment, render


def callers(rule):
    """Components in the `from` of one rule; None: everybody."""
    if "from" not in rule:
        return None
    return [
        component
        for peer in rule["from"]
        for expression in peer["podSelector"].get("matchExpressions", [])
        for component in expression["values"]
    ]


def rules(name, *values):
    spec = render(*values).get("NetworkPolicy", f"chat-baton-{name}")["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    return [
        (callers(rule), [port["port"] for port in rule.get("ports", [])])
        for rule in spec["ingress"]
    ]


def test_workers_reach_each_other_on_all_ports_and_routers_reach_their_grpc():
    expected = [(["prefill", "decode"], []), (["router"], [50052]), (None, [9102])]
    assert rules("prefill") == rules("decode") == expected


def test_pairs_are_held_in_like_workers():
    expected = [(["pair"], []), (["router"], [50052]), (None, [9102])]
    assert rules("pair", "nvlink.mode=paired") == expected


def test_readers_of_metrics_can_be_limited():
    value = 'networkPolicy.metricsFrom=[{"namespaceSelector":{}}]'
    spec = render(value).get("NetworkPolicy", "chat-baton-decode")["spec"]
    assert spec["ingress"][-1]["from"] == [{"namespaceSelector": {}}]


def test_peers_are_those_of_the_same_release():
    policy = render().get("NetworkPolicy", "chat-baton-decode")["spec"]
    for rule in policy["ingress"][:-1]:
        for peer in rule["from"]:
            labels = peer["podSelector"]["matchLabels"]
            assert labels == {"app.kubernetes.io/instance": "chat"}


def test_redis_is_for_those_who_use_it():
    assert rules("redis") == [(["router", "adapter", "prefill", "decode"], [6379])]


def test_everybody_may_call_the_router_on_its_two_ports():
    assert rules("router") == [(None, [50051, 8000])]


def test_callers_of_the_router_can_be_limited_and_helm_test_still_works():
    value = 'networkPolicy.routerFrom=[{"podSelector":{"matchLabels":{"app":"gateway"}}}]'
    assert rules("router", value) == [(["test"], [50051, 8000])]
    spec = render(value).get("NetworkPolicy", "chat-baton-router")["spec"]
    assert spec["ingress"][0]["from"][0] == {"podSelector": {"matchLabels": {"app": "gateway"}}}


def test_the_api_server_reaches_the_adapter():
    assert rules("adapter") == [(None, [6443])]


def test_policies_can_be_left_out():
    assert render("networkPolicy.enabled=false").names("NetworkPolicy") == []


def test_helm_test_generates_one_token_through_the_service():
    (pod,) = render("router.service.grpcPort=80", "test.apiKeySecret.name=key").all("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    assert container["args"][:3] == ["baton", "generate", "--max-tokens=1"]
    assert container["env"] == [
        {"name": "BATON_SERVER", "value": "chat-baton-router:80"},
        {
            "name": "BATON_API_KEY",
            "valueFrom": {"secretKeyRef": {"name": "key", "key": "api-key"}},
        },
    ]


def test_services_listen_on_ipv6_where_they_are_told_to():
    rendering = render("listenAddress=::")
    for component in ("router", "prefill", "decode"):
        assert rendering.settings(component)["BATON_HOST"] == "::"
    assert environment(rendering.container("adapter"))["BATON_HOST"] == "::"

"""What holds for every pod of the chart."""

from __future__ import annotations

import pytest

from tests.helm.rendering import environment, render

WORKLOADS = {
    "router": "Deployment",
    "prefill": "Deployment",
    "decode": "Deployment",
    "adapter": "Deployment",
    "redis": "StatefulSet",
}


def pods(*values):
    rendering = render(*values)
    (test,) = rendering.all("Pod")
    return [*(rendering.pod(name, kind) for name, kind in WORKLOADS.items()), test["spec"]]


def containers(*values):
    return [
        container
        for pod in pods(*values)
        for container in [*pod.get("initContainers", []), *pod["containers"]]
    ]


def test_the_list_of_workloads_is_whole():
    rendering = render()
    names = [*rendering.names("Deployment"), *rendering.names("StatefulSet")]
    assert sorted(names) == sorted(f"chat-baton-{component}" for component in WORKLOADS)


def test_no_pod_runs_as_root():
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("source", ["model.source=hub", "model.image.reference=example.com/model"])
def test_no_container_gains_privileges_or_writes_to_its_image(source):
    values = [source] if "hub" in source else [source, "model.source=image"]
    for container in containers(*values):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}


def test_no_service_of_the_namespace_gets_into_the_environment():
    # Kubernetes would set BATON_PORT for a Service called baton, and that is a flag.
    assert [pod["enableServiceLinks"] for pod in pods()] == [False] * len(pods())


def test_workers_and_redis_do_not_talk_to_the_api_server():
    tokens = [pod["automountServiceAccountToken"] for pod in pods()]
    assert dict(zip([*WORKLOADS, "test"], tokens, strict=True)) == {
        "router": True,
        "prefill": False,
        "decode": False,
        "adapter": True,
        "redis": False,
        "test": False,
    }


def test_secrets_are_neither_in_arguments_nor_written_out_in_variables():
    values = (
        "model.hub.tokenSecret.name=s-hub",
        "redis.enabled=false",
        "redis.external.urlSecret.name=s-redis",
        "test.apiKeySecret.name=s-key",
    )
    rendering = render(*values)
    found = set()
    for pod in [*(rendering.pod(name) for name in ("router", "prefill", "decode", "adapter"))]:
        for container in pod["containers"]:
            assert "s-" not in " ".join(container["args"])
            for name, value in environment(container).items():
                if isinstance(value, dict) and "secretKeyRef" in value:
                    found.add((name, value["secretKeyRef"]["name"]))
    assert found == {("HF_TOKEN", "s-hub"), ("BATON_REDIS_URL", "s-redis")}


def test_every_container_says_what_it_needs():
    for container in containers():
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


def test_images_come_from_the_registry_by_tag_or_digest():
    digest = "sha256:" + "0" * 64
    rendering = render(
        "image.registry=registry.example.com/team",
        "worker.image.tag=v2",
        f"router.image.digest={digest}",
        'image.pullSecrets=["registry"]',
    )
    team = "registry.example.com/team"
    assert rendering.container("decode")["image"] == f"{team}/baton-worker:v2"
    assert rendering.container("router")["image"] == f"{team}/baton-router:0.1.0@{digest}"
    assert rendering.container("adapter")["image"] == f"{team}/baton-router:0.1.0@{digest}"
    assert rendering.pod("decode")["imagePullSecrets"] == [{"name": "registry"}]


def test_pods_run_where_their_values_say():
    place = '{"nodeSelector":{"pool":"gpu"},"priorityClassName":"high","tolerations":[{"key":"x"}]}'
    pod = render(f"decode={place}").pod("decode")
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["priorityClassName"] == "high"
    assert pod["tolerations"] == [{"key": "x"}]
    assert "nodeSelector" not in render(f"decode={place}").pod("prefill")


def test_pods_are_not_replaced_for_a_new_version_of_the_chart_alone():
    for name, kind in WORKLOADS.items():
        template = render().get(kind, f"chat-baton-{name}")["spec"]["template"]
        assert "helm.sh/chart" not in template["metadata"]["labels"]


def test_every_workload_has_a_service_account_of_its_own():
    accounts = render().names("ServiceAccount")
    assert accounts == sorted(f"chat-baton-{component}" for component in WORKLOADS)
    assert [pod["serviceAccountName"] for pod in pods()[:-1]] == [
        f"chat-baton-{component}" for component in WORKLOADS
    ]


def test_evictions_take_the_pods_of_a_component_one_at_a_time():
    rendering = render()
    assert rendering.names("PodDisruptionBudget") == [
        "chat-baton-decode",
        "chat-baton-prefill",
        "chat-baton-router",
    ]
    assert {one["spec"]["maxUnavailable"] for one in rendering.all("PodDisruptionBudget")} == {1}
    assert render("podDisruptionBudget.enabled=false").names("PodDisruptionBudget") == []

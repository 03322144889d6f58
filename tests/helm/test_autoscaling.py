"""Replicas by queue depth: HPAs, KEDA's objects, and the adapter."""

from __future__ import annotations

from dataclasses import fields

import pytest

from router.demand import Totals
from tests.helm.rendering import environment, refusal, render


def targets(autoscaler):
    metrics = [metric["external"] for metric in autoscaler["spec"]["metrics"]]
    return {one["metric"]["name"]: one["target"] for one in metrics}


def average(value):
    return {"type": "AverageValue", "averageValue": value}


@pytest.mark.parametrize("source", ["builtin", "prometheus"])
def test_each_role_scales_by_its_own_queue(source):
    rendering = render(f"autoscaling.source={source}", "autoscaling.decode.targets.blocks=3000")
    assert targets(rendering.get("HorizontalPodAutoscaler", "chat-baton-prefill")) == {
        "baton_prefill_prompts": average("2"),
        "baton_prefill_queued_tokens": average("15000"),
    }
    assert targets(rendering.get("HorizontalPodAutoscaler", "chat-baton-decode")) == {
        "baton_decode_sequences": average("48"),
        "baton_decode_blocks": average("3000"),
    }


def test_only_numbers_of_this_release_count():
    autoscaler = render().get("HorizontalPodAutoscaler", "chat-baton-decode")
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["external"]["metric"]["selector"] == {"matchLabels": {"release": "chat-baton"}}
    assert render().settings("router")["BATON_RELEASE"] == "chat-baton"


@pytest.mark.parametrize("source", ["builtin", "keda", "prometheus"])
@pytest.mark.parametrize("mode", ["off", "paired"])
def test_nobody_but_the_autoscaler_sets_the_replicas(source, mode):
    rendering = render(f"autoscaling.source={source}", f"nvlink.mode={mode}")
    deployments = rendering.all("Deployment")
    fixed = {one["metadata"]["name"] for one in deployments if "replicas" in one["spec"]}
    assert fixed <= {"chat-baton-router", "chat-baton-adapter"}


def test_without_autoscaling_the_values_set_them():
    rendering = render("autoscaling.source=none", "worker.replicas=2", "decode.replicas=3")
    assert rendering.get("Deployment", "chat-baton-prefill")["spec"]["replicas"] == 2
    assert rendering.get("Deployment", "chat-baton-decode")["spec"]["replicas"] == 3
    assert rendering.names("HorizontalPodAutoscaler") == rendering.names("ScaledObject") == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_scaling_follows_bursts_late_and_lulls_later(role):
    behavior = render().get("HorizontalPodAutoscaler", f"chat-baton-{role}")["spec"]["behavior"]
    windows = {way: rules["stabilizationWindowSeconds"] for way, rules in behavior.items()}
    assert windows == {"scaleUp": 30, "scaleDown": 300}
    assert behavior["scaleUp"]["policies"] == [
        {"type": "Percent", "value": 100, "periodSeconds": 15},
        {"type": "Pods", "value": 4, "periodSeconds": 15},
    ]


def test_limits_are_those_of_the_role():
    rendering = render("autoscaling.decode.minReplicas=2", "autoscaling.decode.maxReplicas=5")
    spec = rendering.get("HorizontalPodAutoscaler", "chat-baton-decode")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 5)
    assert spec["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "chat-baton-decode",
    }


def test_keda_asks_the_router_itself():
    rendering = render("autoscaling.source=keda", "router.service.httpPort=80")
    assert rendering.names("HorizontalPodAutoscaler") == []
    spec = rendering.get("ScaledObject", "chat-baton-prefill")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 8)
    first = spec["triggers"][0]
    assert (first["type"], first["metricType"]) == ("metrics-api", "AverageValue")
    assert first["metadata"] == {
        "url": "http://chat-baton-router.serving.svc:80/demand",
        "valueLocation": "prefill_prompts",
        "targetValue": "2",
    }


def test_keda_finds_its_numbers_in_what_the_router_answers():
    rendering = render("autoscaling.source=keda", "autoscaling.decode.targets.blocks=3000")
    triggers = [one for each in rendering.all("ScaledObject") for one in each["spec"]["triggers"]]
    wanted = [one["metadata"]["valueLocation"] for one in triggers]
    assert sorted(wanted) == sorted(field.name for field in fields(Totals))


@pytest.mark.parametrize("source", ["keda", "prometheus", "none"])
def test_the_adapter_is_there_only_as_the_source(source):
    rendering = render(f"autoscaling.source={source}")
    assert rendering.names("APIService") == []
    assert rendering.names("ClusterRole") == []
    assert "chat-baton-adapter" not in rendering.names("Deployment")


def test_the_cluster_finds_external_metrics_at_the_adapter():
    spec = render().get("APIService", "v1beta1.external.metrics.k8s.io")["spec"]
    assert spec["service"] == {"name": "chat-baton-adapter", "namespace": "serving", "port": 443}
    # The adapter makes its certificate and enters the CA; nobody skips the check of it.
    assert not {"caBundle", "insecureSkipTLSVerify"} & spec.keys()


def test_a_given_certificate_is_mounted_and_the_adapter_may_change_nothing():
    rendering = render(
        "autoscaling.adapter.tls.existingSecret=cert", "autoscaling.adapter.tls.caBundle=Q0E="
    )
    spec = rendering.get("APIService", "v1beta1.external.metrics.k8s.io")["spec"]
    assert spec["caBundle"] == "Q0E="
    assert (
        environment(rendering.container("adapter"))["BATON_TLS_KEY_FILE"]
        == "/etc/baton/tls/tls.key"
    )
    volumes = rendering.pod("adapter")["volumes"]
    assert {"name": "tls", "secret": {"secretName": "cert"}} in volumes
    assert rendering.names("ClusterRole") == []


def test_cert_manager_can_make_the_certificate_and_tell_the_api_server():
    rendering = render("autoscaling.adapter.tls.certManager=true")
    spec = rendering.get("Certificate", "chat-baton-adapter")["spec"]
    assert spec["dnsNames"][0] == "chat-baton-adapter.serving.svc"
    volumes = rendering.pod("adapter")["volumes"]
    assert {"name": "tls", "secret": {"secretName": spec["secretName"]}} in volumes
    service = rendering.get("APIService", "v1beta1.external.metrics.k8s.io")
    assert service["metadata"]["annotations"] == {
        "cert-manager.io/inject-ca-from": "serving/chat-baton-adapter"
    }
    assert rendering.names("ClusterRole") == []
    values = ("autoscaling.source=none", "autoscaling.adapter.tls.certManager=true")
    assert render(*values).names("Certificate") == []


def test_the_adapter_is_told_the_names_that_its_certificate_needs():
    variables = environment(render().container("adapter"))
    assert variables["BATON_SERVICE_NAME"] == "chat-baton-adapter"
    assert variables["BATON_SERVICE_NAMESPACE"] == variables["BATON_NAMESPACE"] == "serving"


def test_two_adapters_never_want_different_certificates_to_be_trusted():
    deployment = render().get("Deployment", "chat-baton-adapter")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert "needs autoscaling.adapter.tls.existingSecret" in refusal(
        "autoscaling.adapter.replicas=2"
    )
    for given in ("existingSecret=cert", "certManager=true"):
        values = ("autoscaling.adapter.replicas=2", f"autoscaling.adapter.tls.{given}")
        assert render(*values).get("Deployment", "chat-baton-adapter")["spec"]["replicas"] == 2
    both = ("existingSecret=cert", "certManager=true")
    assert "that certManager does not make" in refusal(
        *(f"autoscaling.adapter.tls.{given}" for given in both)
    )


def test_the_adapter_may_change_its_own_api_service_only():
    (role,) = render().all("ClusterRole")
    assert role["rules"] == [
        {
            "apiGroups": ["apiregistration.k8s.io"],
            "resources": ["apiservices"],
            "resourceNames": ["v1beta1.external.metrics.k8s.io"],
            "verbs": ["get", "patch"],
        }
    ]


def test_the_hpa_controller_may_read_external_metrics_here():
    rendering = render()
    assert rendering.get("Role", "chat-baton-adapter-reader")["rules"][0]["apiGroups"] == [
        "external.metrics.k8s.io"
    ]
    (subject,) = rendering.get("RoleBinding", "chat-baton-adapter-reader")["subjects"]
    assert subject == {
        "kind": "ServiceAccount",
        "name": "horizontal-pod-autoscaler",
        "namespace": "kube-system",
    }


def test_the_adapter_may_read_whom_the_front_proxy_is():
    binding = render().get("RoleBinding", "serving-chat-baton-adapter")
    assert binding["metadata"]["namespace"] == "kube-system"
    assert binding["roleRef"]["name"] == "extension-apiserver-authentication-reader"

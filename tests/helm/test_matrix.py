"""Every Helm, Kubernetes, source of autoscaling and example: valid objects, strictly."""

from __future__ import annotations

import json
from functools import cache

import kubernetes_validate
import pytest

from tests.helm.rendering import CHART, EXAMPLES, HELM_3, HELM_4, render, run_helm

KUBERNETES = ("1.27", "1.31", "1.34", "1.37")
SOURCES = ("builtin", "keda", "prometheus", "none")
CUSTOM_KINDS = {"ScaledObject", "ServiceMonitor", "PrometheusRule", "Certificate", "Issuer"}
TLS = {
    "secret": ("tls.mode=secret", "tls.secretName=certs"),
    "certManager": ("tls.mode=certManager",),
}
EVERYTHING = (
    "metrics.serviceMonitor.enabled=true",
    "metrics.dashboard.enabled=true",
    "metrics.alerts.enabled=true",
    "router.apiKeysSecret.name=keys",
    "router.tenantsSecret.name=tenants",
    "model.hub.tokenSecret.name=hub",
    "test.apiKeySecret.name=key",
    'image.pullSecrets=["registry"]',
    "kvDomain.topologyKey=rack",
    "rdma.enabled=true",
    "nvlink.mode=host",
    "tls.mode=certManager",
    "tls.certManager.issuerRef.name=serving",
    "tracing.endpoint=http://collector:4318/v1/traces",
    "autoscaling.adapter.tls.certManager=true",
)


@cache
def check(manifest: str, kubernetes: str) -> None:
    kubernetes_validate.validate(json.loads(manifest), kubernetes, strict=True)


def check_all(rendering, kubernetes):
    for manifest in rendering.manifests:
        if manifest["kind"] not in CUSTOM_KINDS:
            check(json.dumps(manifest, sort_keys=True), kubernetes)


def in_order(rendering):
    key = lambda one: (one["kind"], one["metadata"]["name"])  # noqa: E731
    return sorted(rendering.manifests, key=key)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda file: file.stem if file else "-")
def test_every_object_is_valid_and_the_same_in_both_helms(example, kubernetes, source):
    files = [example] if example else []
    value = f"autoscaling.source={source}"
    of_helm_3 = render(value, files=files, helm=HELM_3, kubernetes=kubernetes)
    of_helm_4 = render(value, files=files, helm=HELM_4, kubernetes=kubernetes)
    check_all(of_helm_4, kubernetes)
    assert in_order(of_helm_3) == in_order(of_helm_4)


@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_every_object_is_valid_with_all_options_on(kubernetes):
    check_all(render(*EVERYTHING, kubernetes=kubernetes), kubernetes)


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("mode", TLS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_every_object_is_valid_with_mutual_tls(example, mode, kubernetes):
    of_helm_3, of_helm_4 = (
        render(*TLS[mode], files=[example], helm=helm, kubernetes=kubernetes)
        for helm in (HELM_3, HELM_4)
    )
    check_all(of_helm_4, kubernetes)
    assert in_order(of_helm_3) == in_order(of_helm_4)


def test_the_check_is_strict():
    manifest = render().get("Service", "chat-baton-router")
    broken = {**manifest, "spec": {**manifest["spec"], "selektor": {}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="selektor"):
        check(json.dumps(broken), "1.34")


@pytest.mark.parametrize("helm", [HELM_3, HELM_4], ids=lambda helm: helm.version)
@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda file: file.stem if file else "-")
def test_helm_lint_has_no_warning(example, helm):
    values = ["--values", str(example)] if example else []
    finished = run_helm(helm, "lint", "--strict", "--quiet", *values, str(CHART))
    assert finished.returncode == 0, finished.stdout


@pytest.mark.parametrize("helm", [HELM_3, HELM_4], ids=lambda helm: helm.version)
def test_the_chart_can_be_packaged(helm, tmp_path):
    finished = run_helm(helm, "package", str(CHART), "--destination", str(tmp_path))
    assert finished.returncode == 0, finished.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["baton-0.1.0.tgz"]

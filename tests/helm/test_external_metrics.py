"""A cluster has one external metrics API: the chart does not take it from its owner."""

from __future__ import annotations

import pytest

from tests.helm.fake_cluster import API_SERVICES, fake_cluster
from tests.helm.rendering import CHART, HELM_3, HELM_4, NAMESPACE, run_helm

HELMS = pytest.mark.parametrize("helm", [HELM_3, HELM_4], ids=lambda helm: helm.version)
NAME = "v1beta1.external.metrics.k8s.io"


def api_service(namespace, service, release=None):
    metadata = {"name": NAME}
    if release is not None:
        metadata["labels"] = {"app.kubernetes.io/managed-by": "Helm"}
        metadata["annotations"] = {
            "meta.helm.sh/release-name": release,
            "meta.helm.sh/release-namespace": namespace,
        }
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": metadata,
        "spec": {"service": {"namespace": namespace, "name": service}},
    }


def render_in_cluster(helm, folder, found, source="builtin"):
    """Renders for a cluster with (or without) an APIService."""
    objects = {f"{API_SERVICES}/{NAME}": found} if found else {}
    with fake_cluster(objects, folder) as config:
        args = ["--namespace", NAMESPACE, "--kubeconfig", str(config)]
        args += ["--dry-run=server", "--disable-openapi-validation"]
        args += ["--set", f"autoscaling.source={source}"]
        return run_helm(helm, "template", "chat", str(CHART), *args)


@HELMS
def test_another_owner_is_named_with_what_to_set(helm, tmp_path):
    found = api_service("keda", "keda-operator-metrics-apiserver", "keda")
    finished = render_in_cluster(helm, tmp_path, found)
    assert finished.returncode != 0
    assert "belongs to the Service keda/keda-operator-metrics-apiserver" in finished.stderr
    assert "set autoscaling.source to keda" in finished.stderr


@HELMS
def test_a_release_of_the_same_name_elsewhere_is_another_owner(helm, tmp_path):
    finished = render_in_cluster(helm, tmp_path, api_service("other", "chat-baton-adapter", "chat"))
    assert "belongs to the Service other/chat-baton-adapter" in finished.stderr


@HELMS
def test_an_owner_that_helm_did_not_install_counts_too(helm, tmp_path):
    finished = render_in_cluster(helm, tmp_path, api_service("monitoring", "prometheus-adapter"))
    assert "belongs to the Service monitoring/prometheus-adapter" in finished.stderr


@HELMS
def test_an_upgrade_finds_its_own(helm, tmp_path):
    found = api_service(NAMESPACE, "chat-baton-adapter", "chat")
    finished = render_in_cluster(helm, tmp_path, found)
    assert finished.returncode == 0, finished.stderr


@HELMS
def test_a_cluster_without_one_is_free(helm, tmp_path):
    finished = render_in_cluster(helm, tmp_path, None)
    assert finished.returncode == 0, finished.stderr


@HELMS
@pytest.mark.parametrize("source", ["keda", "prometheus", "none"])
def test_the_owner_does_not_matter_to_other_sources(source, helm, tmp_path):
    finished = render_in_cluster(helm, tmp_path, api_service("keda", "keda", "keda"), source)
    assert finished.returncode == 0, finished.stderr

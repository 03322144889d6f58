"""Dashboard, alerts and monitors speak of metrics that exist and of help that is there."""

from __future__ import annotations

import json
import re

import pytest

from tests.helm.rendering import ROOT, render

OPTIONS = (
    "metrics.serviceMonitor.enabled=true",
    "metrics.dashboard.enabled=true",
    "metrics.alerts.enabled=true",
    "metrics.serviceMonitor.labels.release=prometheus",
)
REFERENCE = ROOT / "docs" / "metrics.md"
SCALED_BY = {
    "baton_prefill_prompts",
    "baton_prefill_queued_tokens",
    "baton_decode_sequences",
    "baton_decode_blocks",
}


def defined():
    """Names that the code exports; the reference is made from it."""
    names = re.findall(r"^\| `(baton_\w+)`", REFERENCE.read_text(), re.MULTILINE)
    return {name.removesuffix("_total") for name in names}


def dashboard():
    return json.loads(
        render(*OPTIONS).get("ConfigMap", "chat-baton-dashboard")["data"]["baton.json"]
    )


def queries():
    return [
        target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])
    ]


def rules():
    (group,) = render(*OPTIONS).get("PrometheusRule", "chat-baton-alerts")["spec"]["groups"]
    return group["rules"]


def metrics_in(expressions):
    names = {name for one in expressions for name in re.findall(r"baton_\w+", one)}
    return {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names}


def test_every_metric_of_the_dashboard_is_one_that_exists():
    assert metrics_in(queries()) - defined() == set()


def test_every_metric_of_the_alerts_is_one_that_exists():
    assert metrics_in(rule["expr"] for rule in rules()) - defined() == set()


def test_every_metric_of_the_docs_is_one_that_exists():
    code = "".join(re.findall(r"`[^`]+`", (ROOT / "docs/kubernetes.md").read_text()))
    assert metrics_in([code]) - defined() - SCALED_BY == set()


def test_the_dashboard_asks_only_for_the_chosen_source_and_namespace():
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            selectors = re.findall(r"baton_\w+(\{.*?\})", target["expr"])
            assert selectors
            assert set(selectors) == {'{namespace="$namespace"}'}


def test_panels_are_numbered_and_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_every_alert_leads_to_a_part_of_the_runbook():
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs/kubernetes.md").read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    for rule in rules():
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert path == "docs/kubernetes.md"
        assert anchor in anchors


def test_alerts_are_about_this_release():
    router = 'namespace="serving",service="chat-baton-router"'
    workers = 'namespace="serving",service=~"chat-baton-(prefill|decode)"'
    for rule in rules():
        of_workers = rule["alert"] in ("BatonReadsFail", "BatonBlocksQuarantined")
        assert (workers if of_workers else router) in rule["expr"]


def test_prometheus_scrapes_routers_and_workers():
    monitor = render(*OPTIONS).get("ServiceMonitor", "chat-baton-metrics")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    assert expression["values"] == ["router", "prefill", "decode"]
    endpoints = monitor["spec"]["endpoints"]
    assert [(one["port"], one["path"]) for one in endpoints] == [
        ("http", "/metrics"),
        ("metrics", "/metrics"),
    ]
    for one in endpoints:
        assert one["relabelings"] == [{"targetLabel": "release", "replacement": "chat-baton"}]


@pytest.mark.parametrize(("role", "port"), [("prefill", 9102), ("decode", 9103)])
def test_workers_serve_metrics_where_their_service_says(role, port):
    rendering = render()
    assert rendering.settings(role)["BATON_METRICS_PORT"] == str(port)
    found = rendering.get("Service", f"chat-baton-{role}")["spec"]["ports"][1]
    assert (found["name"], found["targetPort"]) == ("metrics", f"{role}-metrics")
    assert rendering.container(role)["ports"][1] == {
        "name": f"{role}-metrics",
        "containerPort": port,
    }


def test_nothing_of_it_is_there_unless_asked_for():
    rendering = render()
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert rendering.names(kind) == []
    assert "chat-baton-dashboard" not in rendering.names("ConfigMap")

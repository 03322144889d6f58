"""The router's objects."""

from __future__ import annotations

import pytest

from tests.helm.rendering import environment, render


def test_clients_find_both_protocols_at_one_service():
    ports = render("router.service.httpPort=80").get("Service", "chat-baton-router")["spec"][
        "ports"
    ]
    assert [(port["name"], port["port"], port["targetPort"]) for port in ports] == [
        ("grpc", 50051, "grpc"),
        ("http", 80, "http"),
    ]


def test_it_is_ready_by_grpc_health_and_alive_by_its_metrics():
    router = render().container("router")
    assert router["readinessProbe"]["grpc"] == {"port": 50051}
    assert router["livenessProbe"]["httpGet"] == {"path": "/metrics", "port": "http"}


def test_its_settings_come_from_a_config_map_and_replace_pods_when_they_change():
    def checksum(rendering):
        template = rendering.get("Deployment", "chat-baton-router")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/settings"]

    before, after = render(), render("router.settings.worker_wait_s=30")
    assert after.settings("router")["BATON_WORKER_WAIT_S"] == "30"
    assert checksum(before) != checksum(after)


def test_lists_are_given_as_the_settings_read_them():
    settings = render('router.settings.fallback_classes=["gold","silver"]').settings("router")
    assert settings["BATON_FALLBACK_CLASSES"] == '["gold","silver"]'


def test_keys_and_tenants_are_files_of_secrets():
    rendering = render("router.apiKeysSecret.name=keys", "router.tenantsSecret.name=tenants")
    assert rendering.settings("router")["BATON_API_KEYS"] == "/etc/baton/api-keys/api-keys"
    assert rendering.settings("router")["BATON_TENANTS"] == "/etc/baton/tenants/tenants.yaml"
    secrets = [one["secret"] for one in rendering.pod("router")["volumes"] if "secret" in one]
    assert secrets == [{"secretName": "keys"}, {"secretName": "tenants"}]
    mounts = rendering.container("router")["volumeMounts"]
    # A mounted file, other than a folder, would not follow changes of the Secret.
    assert not any("subPath" in mount for mount in mounts)


def test_without_keys_nothing_is_mounted():
    rendering = render()
    assert "BATON_API_KEYS" not in rendering.settings("router")
    assert [one["name"] for one in rendering.pod("router")["volumes"]] == ["scratch", "tmp"]


def test_it_takes_calls_until_no_load_balancer_sends_any():
    router = render("router.preStopSleepSeconds=7").container("router")
    assert router["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]


def test_answers_may_take_what_the_grace_period_leaves():
    rendering = render("router.terminationGracePeriodSeconds=60", "router.preStopSleepSeconds=15")
    assert rendering.settings("router")["BATON_DRAIN_TIMEOUT_S"] == "40"
    assert rendering.pod("router")["terminationGracePeriodSeconds"] == 60


@pytest.mark.parametrize("value", ["router.podDeletionCost=false", "nvlink.mode=paired"])
def test_it_has_no_rights_in_the_cluster_where_it_needs_none(value):
    rendering = render("autoscaling.source=none", value)
    assert rendering.pod("router")["automountServiceAccountToken"] is False
    assert rendering.names("Role") == rendering.names("ClusterRole") == []


def test_for_pod_deletion_costs_it_may_patch_pods_and_nothing_else():
    rendering = render("autoscaling.source=none")
    assert rendering.pod("router")["automountServiceAccountToken"] is True
    assert rendering.get("Role", "chat-baton-router")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}
    ]
    assert rendering.names("ClusterRole") == []


def test_extra_variables_and_volumes_come_last():
    rendering = render(
        'router.extraEnv=[{"name":"FALLBACK_KEY","valueFrom":{"secretKeyRef":'
        '{"name":"fallback","key":"key"}}}]',
        'router.extraVolumes=[{"name":"more","emptyDir":{}}]',
        'router.extraVolumeMounts=[{"name":"more","mountPath":"/more"}]',
    )
    router = rendering.container("router")
    assert environment(router)["FALLBACK_KEY"] == {
        "secretKeyRef": {"name": "fallback", "key": "key"}
    }
    assert router["volumeMounts"][-1] == {"name": "more", "mountPath": "/more"}
    assert rendering.pod("router")["volumes"][-1] == {"name": "more", "emptyDir": {}}

"""Mutual TLS between router and workers."""

from __future__ import annotations

import pytest

from tests.helm.rendering import render

SECRET = ("tls.mode=secret", "tls.secretName=certs")
MODES = {
    "secret": (SECRET, "certs"),
    "certManager": (("tls.mode=certManager",), "chat-baton-tls"),
}
MOUNT = {"name": "tls", "mountPath": "/tls", "readOnly": True}


def tls_settings(rendering, component):
    settings = rendering.settings(component)
    return {name: value for name, value in settings.items() if "TLS" in name}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("component", ["router", "prefill", "decode"])
def test_every_service_has_the_certificate_where_it_looks_for_it(component, mode):
    values, secret = MODES[mode]
    rendering = render(*values)
    assert tls_settings(rendering, component) == {
        "BATON_TLS_CERT": "/tls/tls.crt",
        "BATON_TLS_KEY": "/tls/tls.key",
        "BATON_TLS_CA": "/tls/ca.crt",
    }
    volume = {"name": "tls", "secret": {"secretName": secret}}
    assert volume in rendering.pod(component)["volumes"]
    # A folder, other than a mounted file, follows changes of the Secret.
    assert MOUNT in rendering.container(component)["volumeMounts"]


def test_both_containers_of_a_pair_have_it():
    pod = render(*SECRET, "nvlink.mode=paired").pod("pair")
    assert [MOUNT in container["volumeMounts"] for container in pod["containers"]] == [True, True]
    assert [one["name"] for one in pod["volumes"]].count("tls") == 1


def test_nobody_else_has_it():
    rendering = render(*SECRET)
    for pod in (rendering.pod("adapter"), rendering.pod("redis", "StatefulSet")):
        assert "tls" not in [one["name"] for one in pod["volumes"]]
        assert MOUNT not in pod["containers"][0]["volumeMounts"]


def test_by_default_services_talk_in_plain_text():
    rendering = render()
    for component in ("router", "prefill", "decode"):
        assert tls_settings(rendering, component) == {}
        assert "tls" not in [one["name"] for one in rendering.pod(component)["volumes"]]
    assert rendering.names("Certificate") == rendering.names("Issuer") == []


def test_turning_it_on_replaces_the_pods():
    def checksums(rendering):
        templates = [one["spec"]["template"] for one in rendering.all("Deployment")]
        found = [one["metadata"].get("annotations", {}) for one in templates]
        return {one["checksum/settings"] for one in found if "checksum/settings" in one}

    plain, encrypted = checksums(render()), checksums(render(*SECRET))
    assert len(plain) == len(encrypted) == 3
    assert not plain & encrypted


@pytest.mark.parametrize("values", [(), SECRET, ("tls.mode=certManager",)])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_probes_have_no_certificate_and_need_none(role, values):
    worker = render(*values).container(role)
    port = f"{role}-metrics"
    assert worker["startupProbe"]["httpGet"] == {"path": "/metrics", "port": port}
    assert worker["readinessProbe"]["httpGet"] == {"path": "/health", "port": port}
    assert worker["livenessProbe"]["httpGet"] == {"path": "/metrics", "port": port}
    # The router's own ports are for clients, and stay plain.
    assert render(*values).container("router")["readinessProbe"]["grpc"] == {"port": 50051}


@pytest.mark.parametrize(
    ("values", "protocols"),
    [((), ("kubernetes.io/h2c", "http")), (SECRET, ("https", "http"))],
)
def test_a_workers_service_says_what_is_spoken_at_its_ports(values, protocols):
    ports = render(*values).get("Service", "chat-baton-decode")["spec"]["ports"]
    assert tuple(port["appProtocol"] for port in ports) == protocols


def test_a_secret_of_ones_own_needs_no_cert_manager():
    rendering = render(*SECRET)
    assert rendering.names("Certificate") == rendering.names("Issuer") == []


def test_the_certificate_is_for_servers_and_clients_of_one_name():
    spec = render("tls.mode=certManager").get("Certificate", "chat-baton-tls")["spec"]
    assert spec == {
        "secretName": "chat-baton-tls",
        "dnsNames": ["baton"],
        "duration": "8760h",
        "usages": ["digital signature", "server auth", "client auth"],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "issuerRef": {"name": "chat-baton-tls-ca", "kind": "Issuer", "group": "cert-manager.io"},
    }


def test_the_chart_makes_a_ca_that_signs_for_this_release_alone():
    rendering = render("tls.mode=certManager")
    assert rendering.names("Issuer") == ["chat-baton-tls-ca", "chat-baton-tls-selfsigned"]
    root = rendering.get("Issuer", "chat-baton-tls-selfsigned")["spec"]
    assert root == {"selfSigned": {}}
    ca = rendering.get("Certificate", "chat-baton-tls-ca")["spec"]
    assert (ca["isCA"], ca["issuerRef"]["name"]) == (True, "chat-baton-tls-selfsigned")
    signer = rendering.get("Issuer", "chat-baton-tls-ca")["spec"]
    assert signer == {"ca": {"secretName": ca["secretName"]}}


def test_a_renewed_ca_keeps_its_key_or_pods_would_not_trust_each_other():
    ca = render("tls.mode=certManager").get("Certificate", "chat-baton-tls-ca")["spec"]
    assert ca["privateKey"]["rotationPolicy"] == "Never"


def test_an_issuer_of_ones_own_replaces_the_charts_ca():
    issuer = '{"name":"serving","kind":"ClusterIssuer","group":"cert-manager.io"}'
    rendering = render(
        "tls.mode=certManager",
        f"tls.certManager.issuerRef={issuer}",
        "tls.certManager.duration=720h",
    )
    assert rendering.names("Issuer") == []
    assert rendering.names("Certificate") == ["chat-baton-tls"]
    spec = rendering.get("Certificate", "chat-baton-tls")["spec"]
    assert spec["duration"] == "720h"
    assert spec["issuerRef"] == {
        "name": "serving",
        "kind": "ClusterIssuer",
        "group": "cert-manager.io",
    }

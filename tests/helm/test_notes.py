"""What `helm install` says at its end. Helm 3 does not show it without a cluster."""

from __future__ import annotations

from tests.helm.rendering import CHART, HELM_4, run_helm


def notes(*values):
    args = ["install", "chat", str(CHART), "--namespace", "serving", "--dry-run=client"]
    finished = run_helm(HELM_4, *args, *(arg for value in values for arg in ("--set", value)))
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.partition("NOTES:\n")[2]


def test_the_notes_show_a_first_call_through_the_service():
    text = notes("router.service.grpcPort=80")
    assert "port-forward service/chat-baton-router 50051:80 8000:8000" in text
    assert "127.0.0.1:50051 baton.v1.Inference/Generate" in text
    assert "helm test chat -n serving" in text


def test_the_notes_warn_of_open_doors():
    assert "everybody who reaches the router may call it" in notes()
    assert "can read and write KV" in notes("networkPolicy.enabled=false")
    assert "talk in plain text, and believe whoever calls: tls.mode is off" in notes()


def test_the_notes_are_quiet_about_closed_ones_and_show_the_key():
    text = notes("router.apiKeysSecret.name=keys", "tls.mode=certManager")
    assert "WARNING" not in text
    assert "-H 'authorization: Bearer KEY'" in text

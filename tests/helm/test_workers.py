"""Prefill and decode: their pods, settings, devices and places."""

from __future__ import annotations

import pytest

from tests.helm.rendering import environment, render

ROLES = ("prefill", "decode")


@pytest.mark.parametrize(("role", "port"), [("prefill", 50052), ("decode", 50053)])
def test_a_role_runs_its_service_at_its_port(role, port):
    worker = render().container(role)
    assert worker["args"] == ["python", "-m", f"{role}_svc"]
    assert render().settings(role)["BATON_PORT"] == str(port)


@pytest.mark.parametrize("role", ROLES)
def test_draining_makes_a_worker_unready_and_is_no_reason_to_kill_it(role):
    # While it drains, /health says 503 and /metrics goes on (tests/worker/test_metrics.py).
    worker = render().container(role)
    assert worker["readinessProbe"]["httpGet"]["path"] == "/health"
    assert worker["livenessProbe"]["httpGet"]["path"] == "/metrics"
    assert worker["startupProbe"]["httpGet"]["path"] == "/metrics"


def test_a_worker_has_the_time_to_load_that_it_was_given():
    rendering = render("worker.startupSeconds=1202")
    probe = rendering.container("decode")["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (5, 241)
    deployment = rendering.get("Deployment", "chat-baton-decode")["spec"]
    assert deployment["progressDeadlineSeconds"] == 1502


def test_a_new_pod_can_be_told_to_take_prefixes_over():
    rendering = render("prefill.settings.warm_prefix_share=1")
    assert rendering.settings("prefill")["BATON_WARM_PREFIX_SHARE"] == "1"
    assert "BATON_WARM_PREFIX_SHARE" not in rendering.settings("decode")


def test_a_worker_drains_within_its_grace_period():
    rendering = render("decode.terminationGracePeriodSeconds=600")
    assert rendering.settings("decode")["BATON_DRAIN_TIMEOUT_S"] == "595"
    assert rendering.settings("prefill")["BATON_DRAIN_TIMEOUT_S"] == "295"


def test_every_pod_is_a_worker_of_its_own_that_peers_reach_by_its_address():
    variables = environment(render().container("prefill"))
    assert variables["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert variables["BATON_WORKER_ID"] == "$(POD_NAME)"
    assert variables["BATON_ADVERTISE_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_what_a_role_says_replaces_what_all_workers_have():
    rendering = render(
        "worker.settings.max_num_seqs=64",
        "worker.settings.block_size=32",
        "decode.settings.max_num_seqs=256",
        "decode.terminationGracePeriodSeconds=900",
    )
    assert rendering.settings("prefill")["BATON_MAX_NUM_SEQS"] == "64"
    assert rendering.settings("decode")["BATON_MAX_NUM_SEQS"] == "256"
    assert rendering.settings("decode")["BATON_BLOCK_SIZE"] == "32"
    assert rendering.pod("prefill")["terminationGracePeriodSeconds"] == 300
    assert rendering.pod("decode")["terminationGracePeriodSeconds"] == 900


def test_zero_false_and_empty_replace_what_all_workers_have(tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text(
        "worker: {gpu: {count: 1}, settings: {kv_overlap: true}, tolerations: [{key: x}]}\n"
        "decode: {gpu: {count: 0}, settings: {kv_overlap: false}, tolerations: []}\n"
    )
    rendering = render(files=[file])
    assert rendering.settings("decode")["BATON_DEVICE"] == "cpu"
    assert rendering.settings("decode")["BATON_KV_OVERLAP"] == "false"
    assert "tolerations" not in rendering.pod("decode")
    assert rendering.pod("prefill")["tolerations"] == [{"key": "x"}]


def test_large_numbers_of_a_values_file_stay_whole_numbers(tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text("worker: {settings: {kv_cache_memory_bytes: 17179869184, lease_s: 2.5}}\n")
    settings = render(files=[file]).settings("decode")
    assert settings["BATON_KV_CACHE_MEMORY_BYTES"] == "17179869184"
    assert settings["BATON_LEASE_S"] == "2.5"


def test_a_setting_of_null_is_left_to_the_service():
    settings = render("worker.settings.max_model_len=null").settings("decode")
    assert "BATON_MAX_MODEL_LEN" not in settings


def test_a_change_of_one_roles_settings_replaces_only_its_pods():
    def checksums(rendering):
        templates = [
            rendering.get("Deployment", f"chat-baton-{role}")["spec"]["template"] for role in ROLES
        ]
        return [one["metadata"]["annotations"]["checksum/settings"] for one in templates]

    before, after = checksums(render()), checksums(render("decode.settings.max_num_seqs=8"))
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_a_gpu_is_asked_for_by_its_resource():
    rendering = render("decode.gpu.resource=nvidia.com/mig-3g.40gb")
    assert rendering.container("prefill")["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert rendering.container("decode")["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == 1
    assert rendering.settings("decode")["BATON_DEVICE"] == "cuda"


def test_without_a_gpu_a_worker_computes_on_the_cpu():
    rendering = render("worker.gpu.count=0")
    assert rendering.settings("prefill")["BATON_DEVICE"] == "cpu"
    assert rendering.container("prefill")["resources"]["limits"] == {"memory": "32Gi"}


@pytest.mark.parametrize(("is_enabled", "added"), [("true", ["IPC_LOCK"]), ("false", None)])
def test_memory_may_be_locked_only_with_rdma(is_enabled, added):
    rendering = render(f"rdma.enabled={is_enabled}")
    for role in ROLES:
        capabilities = rendering.container(role)["securityContext"]["capabilities"]
        assert (capabilities["drop"], capabilities.get("add")) == (["ALL"], added)


def test_rdma_cards_are_asked_for_beside_the_gpu():
    limits = render("rdma.enabled=true", "rdma.count=2").container("decode")["resources"]["limits"]
    assert limits["rdma/hca_shared_devices_a"] == 2
    assert limits["nvidia.com/gpu"] == 1
    assert "rdma/hca_shared_devices_a" not in render().container("decode")["resources"]["limits"]


def test_shared_memory_is_as_large_as_asked_for():
    volumes = render("worker.sharedMemory=8Gi").pod("decode")["volumes"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in volumes


def test_pods_of_a_role_are_spread_over_nodes():
    (spread,) = render().pod("decode")["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "decode"
    alone = render("worker.topologySpread.topologyKey=").pod("decode")
    assert "topologySpreadConstraints" not in alone


def test_both_roles_stay_in_one_domain_of_the_fabric():
    for role in ROLES:
        pod = render("kvDomain.topologyKey=nvidia.com/gpu.clique").pod(role)
        (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "nvidia.com/gpu.clique"
        (expression,) = term["labelSelector"]["matchExpressions"]
        assert expression["values"] == ["prefill", "decode"]
    assert "affinity" not in render().pod("decode")


def test_the_domain_may_be_a_wish():
    pod = render("kvDomain.topologyKey=rack", "kvDomain.required=false").pod("decode")
    assert pod["affinity"]["podAffinity"].keys() == {
        "preferredDuringSchedulingIgnoredDuringExecution"
    }


def test_a_headless_service_names_the_pods_of_a_role():
    service = render().get("Service", "chat-baton-decode")["spec"]
    assert service["clusterIP"] == "None"
    assert service["selector"]["app.kubernetes.io/component"] == "decode"
    assert service["ports"][0]["targetPort"] == "decode-grpc"

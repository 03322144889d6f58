"""The ways to have prefill and decode see each other's GPU."""

from __future__ import annotations

from tests.helm.rendering import environment, render

PAIRED = ("nvlink.mode=paired", "autoscaling.source=none")


def test_by_default_a_pod_is_alone_with_its_gpu():
    pod = render().pod("decode")
    assert not {"hostPID", "hostIPC", "shareProcessNamespace"} & pod.keys()
    assert "CUDA_VISIBLE_DEVICES" not in environment(pod["containers"][0])


def test_a_pair_is_one_pod_that_shares_its_process_namespace():
    rendering = render(*PAIRED, "nvlink.pairs=3")
    assert rendering.names("Deployment") == ["chat-baton-pair", "chat-baton-router"]
    assert rendering.get("Deployment", "chat-baton-pair")["spec"]["replicas"] == 3
    assert rendering.pod("pair")["shareProcessNamespace"] is True
    assert [one["name"] for one in rendering.pod("pair")["containers"]] == ["prefill", "decode"]


def test_both_containers_of_a_pair_see_both_gpus_each_its_own_first():
    rendering = render(*PAIRED)
    for role, gpus in (("prefill", "0,1"), ("decode", "1,0")):
        variables = environment(rendering.container("pair", role))
        assert variables["CUDA_VISIBLE_DEVICES"] == gpus
        assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert variables["BATON_WORKER_ID"] == f"$(POD_NAME)-{role}"


def test_the_containers_of_a_pair_have_their_roles_own_settings_and_ports():
    rendering = render(*PAIRED, "decode.settings.max_num_seqs=256")
    for role, port in (("prefill", 50052), ("decode", 50053)):
        container = rendering.container("pair", role)
        assert container["envFrom"] == [{"configMapRef": {"name": f"chat-baton-{role}"}}]
        assert container["ports"][0]["containerPort"] == port
        service = rendering.get("Service", f"chat-baton-{role}")["spec"]
        assert service["selector"]["app.kubernetes.io/component"] == "pair"


def test_a_claim_replaces_the_device_plugin():
    pod = render(*PAIRED, "nvlink.resourceClaimTemplate=two-gpus").pod("pair")
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]
    for container in pod["containers"]:
        assert container["resources"]["claims"] == [{"name": "gpus"}]
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
        assert "NVIDIA_VISIBLE_DEVICES" not in environment(container)


def test_pods_that_share_a_host_see_all_gpus_and_compute_on_their_own():
    rendering = render("nvlink.mode=host", "nvlink.prefillGpu=2", "nvlink.decodeGpu=3")
    for role, gpus in (("prefill", "2,3"), ("decode", "3,2")):
        pod = rendering.pod(role)
        assert pod["hostPID"] is pod["hostIPC"] is True
        variables = environment(pod["containers"][0])
        assert variables["CUDA_VISIBLE_DEVICES"] == gpus
        assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"


def test_two_pods_of_a_role_never_share_a_hosts_gpu():
    affinity = render("nvlink.mode=host").pod("decode")["affinity"]
    (term,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "decode"


def test_pairs_scale_by_the_needs_of_both_roles():
    rendering = render("nvlink.mode=paired")
    assert rendering.names("HorizontalPodAutoscaler") == ["chat-baton-pair"]
    metrics = rendering.all("HorizontalPodAutoscaler")[0]["spec"]["metrics"]
    assert [one["external"]["metric"]["name"] for one in metrics] == [
        "baton_prefill_prompts",
        "baton_prefill_queued_tokens",
        "baton_decode_sequences",
    ]

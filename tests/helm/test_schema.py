"""What the chart refuses, and that it says which value is meant."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.helm.rendering import CHART, HELM_3, HELM_4, refusal, render

WRONG = {
    "autoscaling.prefill.minReplicas=0": "minReplicas",
    "autoscaling.decode.minReplicas=0": "minReplicas",
    "autoscaling.source=cpu": "source",
    "autoscaling.decode.targets.sequences=0": "sequences",
    "autoscaling.prefill.targets.ratio=1": "ratio",
    "colour=blue": "colour",
    "prefill.colour=blue": "colour",
    "router.service.colour=blue": "colour",
    "prefill.settings.max_num_seq=4": "max_num_seq",
    "decode.settings.max_num_seqs=0": "max_num_seqs",
    "decode.settings.kv_transport=rdma": "kv_transport",
    "prefill.settings.warm_prefix_share=1.5": "warm_prefix_share",
    "router.settings.redis_url=x": "redis_url",
    "worker.gpu.resource=gpu": "resource",
    "worker.gpu.resource=nvidia.com/GPU one": "resource",
    "rdma.resource=Rdma_/hca": "resource",
    "worker.gpu.count=-1": "count",
    "worker.sharedMemory=much": "sharedMemory",
    "worker.resources.limits.memory=-1Gi": "memory",
    "nvlink.mode=on": "mode",
    "model.source=s3": "source",
    "model.hub.repository=llama": "repository",
    "redis.external.url=redis://:secret@host": "url",
    "router.image.digest=sha256:12": "digest",
    "fullnameOverride=Chat": "fullnameOverride",
    "tls.mode=on": "mode",
    "tls.secretName=Certs_1": "secretName",
    "tls.certManager.duration=90d": "duration",
    "tls.certManager.issuerRef.kind=clusterissuer": "kind",
    "tls.certManager.issuerRef.colour=blue": "colour",
    "router.settings.tls_cert=/cert": "tls_cert",
    "worker.settings.tls_name=other": "tls_name",
    "tracing.endpoint=collector:4317": "endpoint",
    "tracing.samplingRatio=1.5": "samplingRatio",
    "router.settings.traces_sampling_ratio=1": "traces_sampling_ratio",
}


@pytest.mark.parametrize("helm", [HELM_3, HELM_4], ids=lambda helm: helm.version)
@pytest.mark.parametrize("value", WRONG)
def test_a_wrong_value_is_refused_by_name(value, helm):
    said = refusal(value, helm=helm)
    assert "specifications of the schema" in said
    assert WRONG[value] in said


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["model.source=pvc"], "model.pvc.claimName must be given"),
        (["model.source=image"], "model.image.reference must be given"),
        (["redis.enabled=false"], "give redis.external.url"),
        (["redis.external.url=redis://host"], "set redis.enabled to false"),
        (["autoscaling.prefill.maxReplicas=1", "autoscaling.prefill.minReplicas=2"], "maxReplicas"),
        (["autoscaling.decode.targets.sequences=null"], "decode.targets has no target"),
        (["router.preStopSleepSeconds=115"], "10 above router.preStopSleepSeconds"),
        (["nvlink.mode=host", "nvlink.decodeGpu=0"], "must differ"),
        (["nvlink.mode=paired", "decode.gpu.count=2"], "decode.gpu.count must be 1"),
        (["nvlink.resourceClaimTemplate=two"], "is for nvlink.mode paired"),
        (["tls.mode=secret"], "tls.secretName must be given"),
        (["tls.secretName=certs"], "is for tls.mode secret"),
        (["tls.mode=certManager", "tls.secretName=certs"], "is for tls.mode secret"),
        (["tls.certManager.issuerRef.name=serving"], "is for tls.mode certManager"),
        (
            ["tls.mode=certManager", "tls.certManager.issuerRef.kind=ClusterIssuer"],
            "issuerRef.name must be given",
        ),
        (
            ["tls.mode=certManager", "tls.certManager.issuerRef.group=example.com"],
            "issuerRef.name must be given",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(values, message):
    assert message in refusal(*values)


def test_an_old_kubernetes_is_refused():
    assert "kubeVersion" in refusal(kubernetes="1.26")


def test_a_claim_for_gpus_needs_a_kubernetes_that_has_them():
    values = ("nvlink.mode=paired", "nvlink.resourceClaimTemplate=two")
    assert "needs Kubernetes 1.34" in refusal(*values, kubernetes="1.33")
    assert render(*values, kubernetes="1.34").names("Deployment")


def test_every_object_in_the_schema_refuses_unknown_keys_or_is_kubernetes_own():
    schema = json.loads((CHART / "values.schema.json").read_text())
    free = {"podSecurityContext", "global"}

    def objects(node, path):
        if isinstance(node, dict):
            if node.get("type") == "object" and "properties" in node:
                yield path, node
            for key, child in node.items():
                yield from objects(child, f"{path}/{key}")

    for path, node in objects(schema, ""):
        assert node["additionalProperties"] is False, path
    bare = {key for key, node in schema["properties"].items() if node == {"type": "object"}}
    assert bare <= free


def test_every_value_is_commented():
    lines = (CHART / "values.yaml").read_text().splitlines()
    # Kubernetes' own objects are explained by Kubernetes.
    own = re.compile(
        r" +(requests|limits|runAs\w+|fsGroup\w*|seccompProfile|scaleUp|scaleDown|"
        r"stabilizationWindowSeconds|selectPolicy|policies):"
    )
    group = re.compile(r"[ \w]+:$")
    uncommented = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if re.match(r" *\w+:", line)
        and not own.match(line)
        and not group.match(line)
        and not before.lstrip().startswith("#")
    ]
    assert uncommented == []


def test_every_value_is_in_the_schema():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert values.keys() == schema["properties"].keys() - {"global"}

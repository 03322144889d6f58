"""Where the model comes from: hub, volume or image. Router and workers get the same."""

from __future__ import annotations

import pytest

from tests.helm.rendering import environment, render

PODS = ("router", "prefill", "decode")


@pytest.mark.parametrize("component", PODS)
def test_a_hub_model_is_downloaded_into_scratch_space(component):
    rendering = render("model.hub.repository=owner/model")
    assert rendering.settings(component)["BATON_MODEL"] == "owner/model"
    assert environment(rendering.container(component))["HF_HOME"] == "/scratch/hub"


@pytest.mark.parametrize("component", PODS)
def test_a_claim_keeps_downloads(component):
    rendering = render("model.hub.cacheClaim=cache")
    container = rendering.container(component)
    assert environment(container)["HF_HOME"] == "/models"
    assert {"name": "model", "mountPath": "/models", "readOnly": False} in container["volumeMounts"]
    claim = {"name": "model", "persistentVolumeClaim": {"claimName": "cache"}}
    assert claim in rendering.pod(component)["volumes"]


@pytest.mark.parametrize("component", PODS)
def test_the_hubs_token_is_a_reference_to_a_secret(component):
    container = render("model.hub.tokenSecret.name=hub").container(component)
    assert environment(container)["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}


@pytest.mark.parametrize("component", PODS)
def test_a_volume_is_mounted_read_only_and_nothing_is_downloaded(component):
    rendering = render("model.source=pvc", "model.pvc.claimName=models", "model.pvc.path=a/b/")
    assert rendering.settings(component)["BATON_MODEL"] == "/models/a/b"
    container = rendering.container(component)
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
    assert environment(container)["HF_HUB_OFFLINE"] == "1"


def test_the_root_of_a_volume_can_be_the_model():
    rendering = render("model.source=pvc", "model.pvc.claimName=models")
    assert rendering.settings("decode")["BATON_MODEL"] == "/models"


@pytest.mark.parametrize("component", PODS)
def test_an_images_model_is_copied_before_the_start(component):
    rendering = render(
        "model.source=image", "model.image.reference=example.com/m:1", "model.image.path=/data/m"
    )
    (init,) = rendering.pod(component)["initContainers"]
    assert init["image"] == "example.com/m:1"
    assert init["command"] == ["cp", "-rL", "/data/m", "/models/"]
    assert rendering.settings(component)["BATON_MODEL"] == "/models/m"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ([], "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (["model.name=chat"], "chat"),
        (["model.source=pvc", "model.pvc.claimName=m"], None),
    ],
)
def test_clients_call_it_by_its_name(values, name):
    assert render(*values).settings("router").get("BATON_SERVED_MODEL_NAME") == name

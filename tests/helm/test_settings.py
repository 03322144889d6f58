"""What the chart puts into the environment is what the services read from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.settings import load_settings
from helm import settings_schema
from router.metrics_adapter.settings import AdapterSettings
from router.settings import RouterSettings
from tests.helm.rendering import EXAMPLES, environment, render
from worker.settings import WorkerSettings

COLLECTOR = "http://collector:4318/v1/traces"


def read(monkeypatch, cls, settings, container):
    """A service's settings as they come out of a pod's environment."""
    variables = environment(container)
    texts = {name: value for name, value in variables.items() if isinstance(value, str)}
    for name, value in {**settings, **texts}.items():
        monkeypatch.setenv(name, value.replace("$(POD_NAME)", "pod-1"))
    return load_settings(cls, "service", [])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_a_router_understands_its_environment(example, monkeypatch):
    rendering = render(files=[example])
    settings = rendering.settings("router")
    read_settings = read(monkeypatch, RouterSettings, settings, rendering.container("router"))
    assert (read_settings.host, read_settings.port, read_settings.http_port) == (
        "0.0.0.0",
        50051,
        8000,
    )
    assert read_settings.redis_url == "redis://chat-baton-redis:6379/0"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_a_worker_understands_its_environment(example, role, monkeypatch):
    rendering = render(files=[example])
    is_paired = "chat-baton-pair" in rendering.names("Deployment")
    container = rendering.container("pair" if is_paired else role, role)
    read_settings = read(monkeypatch, WorkerSettings, rendering.settings(role), container)
    assert read_settings.worker_id == (f"pod-1-{role}" if is_paired else "pod-1")
    assert read_settings.device == ("cpu" if example.stem == "cpu" else "cuda")


@pytest.mark.parametrize(
    ("component", "cls"),
    [("router", RouterSettings), ("prefill", WorkerSettings), ("decode", WorkerSettings)],
)
def test_a_service_finds_its_certificate_where_it_is_mounted(component, cls, monkeypatch):
    rendering = render("tls.mode=certManager")
    settings = read(monkeypatch, cls, rendering.settings(component), rendering.container(component))
    assert (settings.tls_cert, settings.tls_key, settings.tls_ca) == (
        Path("/tls/tls.crt"),
        Path("/tls/tls.key"),
        Path("/tls/ca.crt"),
    )
    certificate = rendering.get("Certificate", "chat-baton-tls")["spec"]
    assert certificate["dnsNames"] == [settings.tls_name]


@pytest.mark.parametrize(
    ("component", "cls"),
    [("router", RouterSettings), ("prefill", WorkerSettings), ("decode", WorkerSettings)],
)
def test_every_service_knows_where_traces_go(component, cls, monkeypatch):
    rendering = render(f"tracing.endpoint={COLLECTOR}", "tracing.samplingRatio=0.05")
    settings = read(monkeypatch, cls, rendering.settings(component), rendering.container(component))
    assert settings.otlp_traces_endpoint == COLLECTOR
    if component == "router":
        assert settings.traces_sampling_ratio == 0.05


def test_by_default_nothing_is_traced():
    rendering = render()
    for component in ("router", "prefill", "decode"):
        assert not [name for name in rendering.settings(component) if "TRACES" in name]


def test_every_variable_is_one_that_the_service_reads():
    known = {
        "router": RouterSettings.model_fields.keys() | settings_schema.SET_BY_CHART,
        "prefill": WorkerSettings.model_fields.keys() | settings_schema.SET_BY_CHART,
        "decode": WorkerSettings.model_fields.keys() | settings_schema.SET_BY_CHART,
    }
    rendering = render(
        "router.apiKeysSecret.name=keys",
        "router.tenantsSecret.name=tenants",
        "tls.mode=certManager",
        f"tracing.endpoint={COLLECTOR}",
    )
    for component, fields in known.items():
        names = {*rendering.settings(component), *environment(rendering.container(component))}
        settings = {name.removeprefix("BATON_").lower() for name in names if "BATON_" in name}
        assert settings <= fields, component


def test_an_adapter_understands_its_environment(monkeypatch):
    container = render("autoscaling.adapter.tls.existingSecret=cert").container("adapter")
    own = {name for name in environment(container) if name.startswith("BATON_")}
    fields = AdapterSettings.model_fields
    assert {name.removeprefix("BATON_").lower() for name in own} <= fields.keys()
    adapter = read(monkeypatch, AdapterSettings, {}, container)
    assert (adapter.port, adapter.service_name) == (6443, "chat-baton-adapter")


def test_the_schema_knows_the_flags_of_the_services():
    text = settings_schema.SCHEMA.read_text()
    assert text == settings_schema.render(json.loads(text)), "run `make docs`"


def test_values_of_every_kind_arrive(monkeypatch, tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text(
        "router: {settings: {worker_wait_s: 0.5, fallback_classes: [gold, silver], "
        "local_prefill_max_tokens: 0, cors_origins: https://a.example.com}}\n"
        "decode: {settings: {kv_overlap: false, kv_cache_memory_bytes: 17179869184}}\n"
    )
    rendering = render(files=[file])
    router = read(
        monkeypatch, RouterSettings, rendering.settings("router"), rendering.container("router")
    )
    decode = read(
        monkeypatch, WorkerSettings, rendering.settings("decode"), rendering.container("decode")
    )
    assert router.worker_wait_s == 0.5
    assert router.fallback_classes == ["gold", "silver"]
    assert router.local_prefill_max_tokens == 0
    assert router.cors_origins == "https://a.example.com"
    assert decode.kv_overlap is False
    assert decode.kv_cache_memory_bytes == 17179869184

"""Writes the flags of the services into the chart's values schema.

`router.settings` and `worker.settings` of the chart's values take every flag that the chart does
not set itself, so that a wrong name or value is refused by `helm`, and not by a pod.

    python helm/settings_schema.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from core.settings import Settings
from router.settings import RouterSettings
from worker.settings import WorkerSettings

SCHEMA = Path(__file__).parent / "baton" / "values.schema.json"

SET_BY_CHART = frozenset(
    {
        "advertise_host",
        "api_keys",
        "device",
        "drain_timeout_s",
        "host",
        "http_port",
        "metrics_port",
        "model",
        "otlp_traces_endpoint",
        "port",
        "redis_url",
        "release",
        "served_model_name",
        "tenants",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "tls_name",
        "traces_sampling_ratio",
        "worker_id",
    }
)


def render(schema: dict[str, Any]) -> str:
    """`schema` as text, with the definitions of the services' settings made anew."""
    definitions = schema["definitions"] | {
        "routerSettings": _definition(RouterSettings),
        "workerSettings": _definition(WorkerSettings),
    }
    return json.dumps(schema | {"definitions": definitions}, indent=2, ensure_ascii=False) + "\n"


def _definition(cls: type[Settings]) -> dict[str, Any]:
    model = cls.model_json_schema()
    shared = model.get("$defs", {})
    properties = {
        name: _property(field, shared)
        for name, field in sorted(model["properties"].items())
        if name not in SET_BY_CHART
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(field: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The field's JSON schema without what values do not need, and without references."""
    if "$ref" in field:
        field = field | shared[field["$ref"].rpartition("/")[2]]
    dropped = {"title", "default", "$ref"}
    return {key: value for key, value in field.items() if key not in dropped}


def main() -> int:
    SCHEMA.write_text(render(json.loads(SCHEMA.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tables of metrics for the documentation, from what collectors say of themselves."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

_SUFFIXES = {"counter": "_total", "info": "_info"}


def table(registry: CollectorRegistry) -> str:
    """One row for each metric, in the order of the code: its type, and what it says of itself."""
    rows = ["| metric | type | meaning |", "|---|---|---|"]
    for family in registry.collect():
        name = family.name + _SUFFIXES.get(family.type, "")
        labels = getattr(family, "_labelnames", ())
        by = f"; by {', '.join(f'`{label}`' for label in labels)}" if labels else ""
        rows.append(f"| `{name}` | {family.type} | {family.documentation}{by} |")
    return "\n".join(rows) + "\n"

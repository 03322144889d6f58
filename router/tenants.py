"""Who may ask for what: service classes, tenants and their API keys.

    classes:
      gold:   {share: 0.7, ttft_limit_s: 1.0}
      silver: {share: 0.3, ttft_limit_s: 4.0}
    tenants:
      acme:
        class: gold
        key_sha256: [2bb80d53…]
        tokens_per_min: 100000
    default: {class: bronze}

Keys stand in the file as they are (`keys`) or as SHA-256 in hex (`key_sha256`), or with the
tenant's name in the file of API keys. Callers without a key are the `default` tenant's; where
there is none they are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.api_keys import DEFAULT_TENANT

ClassName = Literal["gold", "silver", "bronze"]


class TenantFileError(Exception):
    """The file cannot be used; the message names the line."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ServiceClass(_Model):
    """What a class of tenants is promised."""

    share: float = Field(ge=0, le=1)
    """Part of the capacity that it gets whenever it wants it; 0: what others leave."""
    ttft_limit_s: float | None = Field(default=None, gt=0)
    """A request that is predicted to wait longer for its first token is refused at once."""


@dataclass(frozen=True)
class Quota:
    """Limits of one tenant over all routers. None is no limit."""

    requests_per_s: float | None = None
    tokens_per_min: float | None = None
    max_concurrent: int | None = None

    @property
    def is_limited(self) -> bool:
        return self != UNLIMITED


UNLIMITED = Quota()


@dataclass(frozen=True)
class Tenant:
    """One party that shares the deployment. `weight` counts among tenants of its class."""

    name: str
    class_name: ClassName
    service_class: ServiceClass
    quota: Quota = UNLIMITED
    weight: float = 1.0
    salt: str = ""
    """Scope of the prefix cache; tenants share what they share a salt for."""


_UNLIMITED_TENANT = Tenant(DEFAULT_TENANT, "silver", ServiceClass(share=1.0))


class _Entry(_Model):
    class_name: ClassName = Field("silver", alias="class")
    weight: float = Field(1.0, gt=0)
    salt: str | None = Field(default=None, max_length=128)
    requests_per_s: float | None = Field(default=None, gt=0)
    tokens_per_min: float | None = Field(default=None, gt=0)
    max_concurrent: int | None = Field(default=None, gt=0)


class _KeyedEntry(_Entry):
    keys: tuple[str, ...] = ()
    key_sha256: tuple[str, ...] = ()


class _Classes(_Model):
    gold: ServiceClass = ServiceClass(share=0.7)
    silver: ServiceClass = ServiceClass(share=0.3)
    bronze: ServiceClass = ServiceClass(share=0.0)


class _File(_Model):
    classes: _Classes = _Classes()
    tenants: dict[str, _KeyedEntry] = {}
    default: _Entry | None = None


class Tenants:
    """All tenants at one time. Without arguments: everybody is one without limits."""

    def __init__(
        self,
        by_name: Mapping[str, Tenant] | None = None,
        by_digest: Mapping[str, str] | None = None,
    ) -> None:
        self._by_name = by_name if by_name is not None else {DEFAULT_TENANT: _UNLIMITED_TENANT}
        self._by_digest = by_digest or {}

    @property
    def has_default(self) -> bool:
        """Whether callers without a key are served."""
        return DEFAULT_TENANT in self._by_name

    @property
    def has_keys(self) -> bool:
        return bool(self._by_digest)

    def named(self, name: str) -> Tenant:
        """The tenant of that name; one that the file does not know is like the default."""
        known = self._by_name.get(name)
        if known is not None:
            return known
        default = self._by_name.get(DEFAULT_TENANT, _UNLIMITED_TENANT)
        return replace(default, name=name, salt=name)

    def name_of(self, key: str) -> str | None:
        """Whose key it is; None for one that the file does not know.

        Digests are compared, so that the time it takes tells nothing about a key.
        """
        return self._by_digest.get(_digest(key))


def parse_tenants(text: str) -> Tenants:
    """Reads the YAML file's text. Raises TenantFileError, which names the line at fault."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text) or {}
        if not isinstance(content, dict):
            raise TenantFileError("line 1: the file must have keys: classes, tenants, default")
        file = _File.model_validate(content)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise TenantFileError(f"line {line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise TenantFileError(str(error)) from None
    except ValidationError as error:
        raise TenantFileError("; ".join(_describe(node, dict(e)) for e in error.errors())) from None
    except (ValueError, RecursionError) as error:  # of a scalar that is no date, of deep nesting
        raise TenantFileError(str(error)) from None
    by_name = {name: _tenant(name, entry, file.classes) for name, entry in file.tenants.items()}
    if DEFAULT_TENANT in by_name:
        line = _line_of(node, ("tenants", DEFAULT_TENANT))
        raise TenantFileError(f"line {line}: a tenant cannot have the name {DEFAULT_TENANT!r}")
    if file.default is not None:
        by_name[DEFAULT_TENANT] = _tenant(DEFAULT_TENANT, file.default, file.classes)
    return Tenants(by_name, _digests(file, node))


def _tenant(name: str, entry: _Entry, classes: _Classes) -> Tenant:
    own_salt = "" if name == DEFAULT_TENANT else name
    return Tenant(
        name=name,
        class_name=entry.class_name,
        service_class=getattr(classes, entry.class_name),
        quota=Quota(
            requests_per_s=entry.requests_per_s,
            tokens_per_min=entry.tokens_per_min,
            max_concurrent=entry.max_concurrent,
        ),
        weight=entry.weight,
        salt=own_salt if entry.salt is None else entry.salt,
    )


def _digests(file: _File, node: Any) -> dict[str, str]:
    """Tenant by digest of key; a key has one tenant."""
    found: dict[str, str] = {}
    for name, entry in file.tenants.items():
        line = _line_of(node, ("tenants", name))
        for digest in _entry_digests(entry, line):
            if found.setdefault(digest, name) != name:
                raise TenantFileError(f"line {line}: {name} has a key of {found[digest]}")
    return found


def _entry_digests(entry: _KeyedEntry, line: int) -> Iterator[str]:
    for key in entry.keys:
        if not key or not key.isprintable() or " " in key:
            raise TenantFileError(f"line {line}: a key is empty or has spaces")
        yield _digest(key)
    for digest in entry.key_sha256:
        if len(digest) != 64 or not set(digest.lower()) <= set("0123456789abcdef"):
            raise TenantFileError(f"line {line}: key_sha256 needs 64 hexadecimal digits")
        yield digest.lower()


def _describe(node: Any, problem: Mapping[str, Any]) -> str:
    """One line of the file for one of pydantic's findings."""
    path = ".".join(str(part) for part in problem["loc"])
    return f"line {_line_of(node, problem['loc'])}: {path}: {problem['msg'].lower()}"


def _line_of(node: Any, path: tuple[int | str, ...]) -> int:
    """The line on which `path` begins, or the last part of it that the file has."""
    line = node.start_mark.line if node is not None else 0
    for part in path:
        if isinstance(node, yaml.MappingNode):
            pairs = [pair for pair in node.value if pair[0].value == part]
            if not pairs:
                break
            line, node = pairs[0][0].start_mark.line, pairs[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line
    return int(line) + 1


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()

"""Tenants, keys and classes from a YAML file that may change."""

import hashlib

import pytest

from core.errors import StartupError, Unauthenticated
from router.tenant_file import TenantBook
from router.tenants import Quota, ServiceClass, TenantFileError, parse_tenants

FILE = """
classes:
  gold: {share: 0.6, ttft_limit_s: 1.5}
tenants:
  acme:
    class: gold
    keys: [sk-acme]
    weight: 2
    requests_per_s: 5
    tokens_per_min: 6000
    max_concurrent: 3
  zeta:
    key_sha256: [DIGEST]
    salt: common
""".replace("DIGEST", hashlib.sha256(b"sk-zeta").hexdigest())


@pytest.fixture
def book(tmp_path):
    """`book(text, keys)`: what a router knows with this file and these API keys."""

    def make(text, keys=None):
        path = tmp_path / "tenants.yaml"
        path.write_text(text)
        if keys is None:
            return TenantBook(path, None)
        (tmp_path / "keys").write_text("".join(f"{key} {keys[key]}\n" for key in keys))
        return TenantBook(path, tmp_path / "keys")

    return make


def test_a_tenant_has_what_the_file_says():
    acme = parse_tenants(FILE).named("acme")
    assert (acme.name, acme.class_name, acme.weight, acme.salt) == ("acme", "gold", 2.0, "acme")
    assert acme.service_class == ServiceClass(share=0.6, ttft_limit_s=1.5)
    assert acme.quota == Quota(requests_per_s=5, tokens_per_min=6000, max_concurrent=3)
    zeta = parse_tenants(FILE).named("zeta")
    assert (zeta.class_name, zeta.salt, zeta.quota.is_limited) == ("silver", "common", False)


def test_a_key_may_stand_in_the_file_as_its_digest(book):
    assert book(FILE).tenant("Bearer sk-acme") == "acme"
    assert book(FILE).tenant("bearer  sk-zeta") == "zeta"


@pytest.mark.parametrize("header", [None, "", "sk-acme", "Bearer sk-acm", "Basic sk-acme"])
def test_who_has_no_known_key_is_refused(book, header):
    with pytest.raises(Unauthenticated):
        book(FILE).tenant(header)


def test_callers_without_a_key_are_the_default_tenant_where_there_is_one(book):
    made = book(FILE + "default: {class: bronze}\n")
    assert made.tenant(None) == "default"
    assert made.current.named("default").class_name == "bronze"
    assert made.current.named("default").salt == ""
    with pytest.raises(Unauthenticated):
        made.tenant("Bearer wrong")


def test_where_there_are_no_keys_any_will_do(book):
    assert book("default: {}").tenant("Bearer whatever") == "default"


def test_keys_may_stand_in_the_file_of_api_keys(book):
    made = book(FILE, {"sk-more": "acme", "sk-new": "newcomer"})
    assert made.tenant("Bearer sk-more") == "acme"
    assert made.tenant("Bearer sk-zeta") == "zeta"
    with pytest.raises(Unauthenticated):
        made.tenant(None)


def test_a_tenant_that_only_the_api_keys_know_is_like_the_default(book):
    newcomer = book(FILE + "default: {class: bronze}\n").current.named("newcomer")
    assert (newcomer.name, newcomer.class_name, newcomer.salt) == ("newcomer", "bronze", "newcomer")


def test_without_a_file_everybody_is_one_tenant_without_limits():
    made = TenantBook(None, None)
    tenant = made.current.named(made.tenant("Bearer whatever"))
    assert (tenant.name, tenant.quota.is_limited, tenant.salt) == ("default", False, "")
    assert tenant.service_class == ServiceClass(share=1.0)


def test_an_empty_file_knows_nobody(book):
    with pytest.raises(Unauthenticated):
        book("").tenant(None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenants:\n  a: {class: gild}", "line 2: tenants.a.class: input should be 'gold'"),
        ("tenants:\n  a:\n    quota: 3", "line 3: tenants.a.quota: extra inputs"),
        ("tenants:\n  a:\n    max_concurrent: 0", "line 3: .*greater than 0"),
        ("tenants:\n  a:\n    keys:\n      - x\n      - 5", "line 5: .*valid string"),
        ("classes:\n  gold: {share: .nan}", "line 2: .*finite"),
        ("classes:\n  gold: {share: 2}", "line 2: .*less than or equal to 1"),
        ("tenants: {a: {keys: [x]}, b: {keys: [x]}}", "line 1: b has a key of a"),
        ("tenants:\n  a: {keys: ['a b']}", "line 2: a key is empty or has spaces"),
        ("tenants:\n  a: {key_sha256: [abc]}", "line 2: key_sha256 needs 64"),
        ("tenants:\n  default: {}", "line 2: a tenant cannot have the name 'default'"),
        ("\ntenants: [", "line 2: expected"),
        ("- 1", "line 1: the file must have keys"),
    ],
)
def test_what_is_wrong_in_the_file_is_told_with_its_line(text, message):
    with pytest.raises(TenantFileError, match=message):
        parse_tenants(text)


@pytest.mark.parametrize("text", ["tenants: 3", "\tx"])
def test_a_start_with_a_wrong_file_fails(book, text):
    with pytest.raises(StartupError, match=r"tenants\.yaml: line 1"):
        book(text)


def test_a_start_without_the_file_fails(tmp_path):
    with pytest.raises(StartupError, match="nowhere"):
        TenantBook(tmp_path / "nowhere", None)


async def test_a_changed_file_is_taken_over_and_a_wrong_one_is_not(book, tmp_path, caplog):
    made = book("tenants: {a: {keys: [one]}}")
    before = made.current
    await made.refresh()
    assert made.current is before
    (tmp_path / "tenants.yaml").write_text("tenants: {a: {keys: [two]}}")
    await made.refresh()
    assert made.tenant("Bearer two") == "a"
    (tmp_path / "tenants.yaml").write_text("tenants: {a: {keys: [two], class: lead}}")
    for _ in range(3):
        await made.refresh()
    assert made.tenant("Bearer two") == "a"
    assert caplog.text.count("line 1: tenants.a.class") == 1


async def test_a_file_that_is_gone_for_a_while_changes_nothing(book, tmp_path, caplog):
    made = book("tenants: {a: {keys: [one]}}")
    (tmp_path / "tenants.yaml").unlink()
    for _ in range(3):
        await made.refresh()
    assert made.tenant("Bearer one") == "a"
    assert caplog.text.count("tenants_refused") == 1
    (tmp_path / "new").write_text("tenants: {a: {keys: [new]}}")
    (tmp_path / "new").replace(tmp_path / "tenants.yaml")
    await made.refresh()
    assert made.tenant("Bearer new") == "a"


async def test_changed_api_keys_are_taken_over_and_wrong_ones_are_not(tmp_path, caplog):
    keys = tmp_path / "keys"
    keys.write_text("one a\n")
    made = TenantBook(None, keys)
    keys.write_text("second b\n")
    await made.refresh()
    assert made.tenant("Bearer second") == "b"
    with pytest.raises(Unauthenticated):
        made.tenant("Bearer one")
    keys.write_text("# none is left\n")
    for _ in range(3):
        await made.refresh()
    assert made.tenant("Bearer second") == "b"
    assert caplog.text.count("api_keys_refused") == 1
    assert "second" not in caplog.text


@pytest.mark.parametrize("text", ["tenants: {a: {salt: 2024-13-01}}", "tenants: " + "[" * 5000])
def test_what_yaml_itself_trips_over_is_an_error_of_the_file(text):
    with pytest.raises(TenantFileError):
        parse_tenants(text)

"""What two workers must share before KV passes between them."""

from __future__ import annotations

from pathlib import Path

from core.fingerprint import hash_scope, mismatches
from kvtransfer.base import MemoryRegion
from kvtransfer.select import make_transport
from tests import tiny_models
from tests.engine.harness import make_engine
from worker.main import _fingerprint


def test_kv_of_quantized_weights_is_kept_apart(tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path)
    transport = make_transport("tcp", "worker@1", MemoryRegion(0, 1, 16, "DRAM"), "127.0.0.1")
    plain, quantized = (
        _fingerprint(make_engine(folder, quantization=name), "digest", transport)
        for name in ("none", "int8")
    )
    assert mismatches(quantized, plain) == ["dtype: own 'float32, int8 weights', peer 'float32'"]
    assert hash_scope(quantized) != hash_scope(plain)

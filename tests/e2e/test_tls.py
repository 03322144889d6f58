"""All services with certificates: requests are handed off, and a stranger is not heard."""

import grpc
import pytest

from baton.v1 import worker_pb2, worker_pb2_grpc
from tests.e2e.stack import running_stack
from tests.pki import Authority, identity


def test_a_deployment_with_mutual_tls_serves_and_is_closed_to_strangers(
    tiny, tmp_path, monkeypatch
):
    folder, reference = tiny("llama-tied")
    identity(tmp_path / "tls", Authority("ours"))
    for variable, file in {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}.items():
        monkeypatch.setenv(f"BATON_TLS_{variable}", str(tmp_path / "tls" / file))
    with running_stack(folder) as stack:
        prompt = list(range(5, 45))
        assert stack.greedy(prompt, 8).token_ids == reference(prompt, 8)
        stack.wait_until_idle()
        with stack.client() as client:
            addresses = [worker.address for worker in client.status().workers]
        assert len(addresses) == 2
        for address in addresses:
            with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
                stub = worker_pb2_grpc.WorkerStub(channel)
                stub.GetWorkerStatus(worker_pb2.WorkerStatusRequest(), timeout=5)

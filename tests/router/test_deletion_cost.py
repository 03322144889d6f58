"""Which pod goes first."""

import pytest

from baton.v1 import types_pb2
from core.errors import Unavailable
from router.deletion_cost import DeletionCosts, deletion_cost, pod_namespace


class Link:
    def __init__(self, worker_id, requests):
        self.worker_id = worker_id
        self.load = None if requests is None else types_pb2.Load(requests=requests)


class Pool:
    def __init__(self, **requests):
        self.links = [Link(name, count) for name, count in requests.items()]


class Cluster:
    def __init__(self, pool):
        self.written, self.is_away = [], False
        self.costs = DeletionCosts(pool, self.write)

    async def write(self, pod, cost):
        if self.is_away:
            raise Unavailable("403 Forbidden")
        self.written.append((pod, cost))


@pytest.mark.parametrize(("requests", "cost"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (100, 7)])
def test_a_pods_cost_grows_with_its_work(requests, cost):
    assert deletion_cost(types_pb2.Load(requests=requests)) == cost


def test_exports_that_are_still_read_are_work():
    assert deletion_cost(types_pb2.Load(exports=2)) == 2


async def test_costs_are_written_once_for_each_pod_that_has_told_its_load():
    cluster = Cluster(Pool(p0=0, d0=5, d1=None))
    for _ in range(2):
        await cluster.costs.update()
    assert cluster.written == [("p0", 0), ("d0", 3)]


async def test_a_cost_that_changes_is_written_again():
    pool = Pool(d0=5)
    cluster = Cluster(pool)
    for count in (5, 6, 8):
        pool.links[0].load.requests = count
        await cluster.costs.update()
    assert cluster.written == [("d0", 3), ("d0", 4)]


async def test_what_could_not_be_written_is_tried_again():
    cluster = Cluster(Pool(d0=5))
    cluster.is_away = True
    await cluster.costs.update()
    cluster.is_away = False
    await cluster.costs.update()
    assert cluster.written == [("d0", 3)]


def test_outside_a_cluster_there_is_no_namespace(tmp_path, monkeypatch):
    file = tmp_path / "namespace"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert pod_namespace(file) is None
    file.write_text("baton\n")
    assert pod_namespace(file) == "baton"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert pod_namespace(file) is None

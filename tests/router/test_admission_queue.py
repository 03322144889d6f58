"""Who goes next: classes by share, tenants by weight, priority within a tenant."""

from collections import Counter

import pytest

from router.admission_queue import FairQueue, Waiting
from router.tenants import ServiceClass, Tenant

SHARES = {"gold": 0.75, "silver": 0.25, "bronze": 0.0}


def tenant(name, class_name="silver", weight=1.0):
    return Tenant(name, class_name, ServiceClass(share=SHARES[class_name]), weight=weight)


GOLD, SILVER, BRONZE = tenant("g", "gold"), tenant("s", "silver"), tenant("b", "bronze")


def fill(queue, count, *tenants, cost=10):
    for _ in range(count):
        for one in tenants:
            queue.push(Waiting(one, cost))


def popped(queue, count):
    """How many of each tenant the next `count` are."""
    return Counter(queue.pop().tenant.name for _ in range(count))


def test_requests_of_one_tenant_go_in_order_of_arrival():
    queue, items = FairQueue(), [Waiting(SILVER, 10) for _ in range(3)]
    for item in items:
        queue.push(item)
    assert [queue.pop() for _ in items] == items


def test_priority_orders_within_a_tenant_only():
    queue = FairQueue()
    low, high = Waiting(SILVER, 10, priority=0), Waiting(SILVER, 10, priority=5)
    other = Waiting(tenant("other"), 10, priority=-5)
    for item in (low, high, other):
        queue.push(item)
    assert [queue.pop() for _ in range(3)] == [high, other, low]


def test_classes_are_served_by_their_shares():
    queue = FairQueue()
    fill(queue, 100, GOLD, SILVER)
    assert popped(queue, 40) == {"g": 30, "s": 10}


def test_bronze_gets_what_is_left():
    queue = FairQueue()
    fill(queue, 3, BRONZE, GOLD, SILVER)
    assert [queue.pop().tenant.name for _ in range(9)][-3:] == ["b", "b", "b"]


def test_a_class_that_is_alone_gets_everything():
    queue = FairQueue()
    fill(queue, 5, SILVER)
    assert popped(queue, 5) == {"s": 5}


def test_tenants_of_a_class_are_served_by_weight_in_tokens():
    queue = FairQueue()
    fill(queue, 100, tenant("two", weight=2.0), cost=10)
    fill(queue, 100, tenant("one"), cost=20)
    # The one asks for twice as many tokens a request and has half the weight.
    assert popped(queue, 50) == {"two": 40, "one": 10}


def test_who_was_away_has_no_claim_for_that_time():
    queue = FairQueue()
    fill(queue, 200, tenant("old"))
    popped(queue, 100)
    fill(queue, 50, tenant("new"))
    assert popped(queue, 20) == {"old": 10, "new": 10}


def test_one_request_at_a_time_gets_no_more_than_its_weight():
    queue, single = FairQueue(), tenant("single", weight=0.25)
    fill(queue, 100, tenant("many"))
    queue.push(Waiting(single, 10))
    served = Counter()
    for _ in range(50):
        name = queue.pop().tenant.name
        served[name] += 1
        if name == "single":
            queue.push(Waiting(single, 10))
    assert served == {"many": 40, "single": 10}


def test_who_gives_up_waiting_leaves_no_trace():
    queue, leaver = FairQueue(), Waiting(GOLD, 70, need_blocks=5)
    queue.push(leaver)
    queue.push(Waiting(SILVER, 10, need_blocks=1))
    queue.remove(leaver)
    assert queue.counts() == {"silver": (1, 10)}
    assert (queue.num_waiting, queue.need_blocks) == (1, 1)
    assert queue.pop().tenant is SILVER
    assert queue.head() is None
    assert (queue.num_waiting, queue.need_blocks, queue.counts()) == (0, 0, {})


def test_a_class_that_was_away_has_no_claim_for_that_time():
    queue = FairQueue()
    fill(queue, 200, GOLD)
    popped(queue, 100)
    fill(queue, 50, SILVER)
    assert popped(queue, 40) == {"g": 30, "s": 10}


@pytest.mark.parametrize(
    ("who", "priority", "tokens"),
    [
        # Its own line and itself, at three quarters of the pace; it is not before itself.
        (GOLD, 0, (40 + 30) / 0.75 - 30),
        (SILVER, 0, (60 + 30) / 0.25 - 30),
        # All with a share, then its own at the least of paces.
        (BRONZE, 0, 40 + 60 + (100 + 30) / 0.01 - 30),
        (GOLD, 1, 30 / 0.75 - 30),
        # A second tenant of the class has half of its pace.
        (tenant("g2", "gold"), 0, 30 / 0.375 - 30),
    ],
)
def test_what_goes_before_a_new_request(who, priority, tokens):
    queue = FairQueue()
    fill(queue, 1, GOLD, cost=40)
    fill(queue, 1, SILVER, cost=60)
    fill(queue, 1, BRONZE, cost=100)
    assert queue.work_ahead(who, priority, cost=30) == pytest.approx(tokens / 200)


def test_nothing_goes_before_the_first():
    assert FairQueue().work_ahead(GOLD, 0, 10) == 0.0


def test_a_class_goes_on_at_the_pace_that_it_had_lately():
    queue = FairQueue()
    fill(queue, 200, SILVER)
    popped(queue, 100)
    fill(queue, 1, GOLD)
    assert queue.work_ahead(SILVER, 0, cost=10) == pytest.approx(1000 / 1010, abs=0.02)
    fill(queue, 200, GOLD)
    popped(queue, 100)
    own = queue.counts()["silver"][1]
    waiting = own + queue.counts()["gold"][1]
    expected = ((own + 10) / 0.25 - 10) / waiting
    assert queue.work_ahead(SILVER, 0, cost=10) == pytest.approx(expected, rel=0.1)


def test_without_a_share_alone_in_line_it_has_the_whole_pace():
    queue = FairQueue()
    fill(queue, 4, BRONZE)
    assert queue.work_ahead(BRONZE, 0, cost=10) == 1.0

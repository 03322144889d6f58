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


@pytest.mark.parametrize(
    ("who", "priority", "part"),
    [
        # Its own 40 tokens at three quarters of the speed: 53 of 200 go before it.
        (GOLD, 0, 40 / 0.75 / 200),
        # Its own 60 at a quarter would be 240; gold and silver together are 100.
        (SILVER, 0, 100 / 200),
        (BRONZE, 0, 1.0),
        (GOLD, 1, 0.0),
        # A tenant that is new to its class shares it.
        (tenant("g2", "gold"), 0, 0.0),
    ],
)
def test_what_goes_before_a_new_request(who, priority, part):
    queue = FairQueue()
    fill(queue, 1, GOLD, cost=40)
    fill(queue, 1, SILVER, cost=60)
    fill(queue, 1, BRONZE, cost=100)
    assert queue.work_ahead(who, priority, cost=10) == pytest.approx(part)


def test_nothing_goes_before_the_first():
    assert FairQueue().work_ahead(GOLD, 0, 10) == 0.0


def test_without_a_share_it_goes_at_the_pace_that_others_have_left_over():
    queue = FairQueue()
    fill(queue, 400, GOLD)
    popped(queue, 200)
    # All 2000 of gold, and its own 10 a hundred times.
    assert queue.work_ahead(BRONZE, 0, cost=10) == pytest.approx((2000 + 1000 - 10) / 2000)
    fill(queue, 40, BRONZE)
    popped(queue, 240)
    # Nobody with a share waits: the bronze line's own pace.
    fill(queue, 2, BRONZE)
    assert queue.work_ahead(BRONZE, 0, cost=10) == 1.0

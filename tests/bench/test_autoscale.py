"""Fleets in simulated time."""

from bench.autoscale import COSTS, Scalers, with_peak
from bench.autoscale_sim import DECODE, PREFILL, Deployment, Simulation
from bench.routing_trace import Request


def steady(count, interval_s=0.5, num_prompt=2000, num_outputs=50):
    return [Request(index * interval_s, num_prompt, num_outputs, ()) for index in range(count)]


def simulate(requests, scale, first=1, **deployment):
    initial = {PREFILL: first, DECODE: first}
    return Simulation(Deployment(COSTS, 2000, initial, **deployment), scale).run(requests)


def keep(replicas):
    return lambda simulation, now: {PREFILL: replicas, DECODE: replicas}


def test_a_fleet_that_is_large_enough_serves_all_in_time():
    outcome = simulate(steady(100), keep(2), first=2)
    assert (outcome.num_refused, outcome.attainment(5.0)) == (0, 1.0)


def test_a_pod_counts_from_its_order_until_it_has_left():
    def one_then_two(simulation, now):
        return {PREFILL: 1 if now < 30 else 2, DECODE: 1}

    outcome = simulate(steady(121), one_then_two)
    # Until the round after the last request, at 75 s; the second pod from 30 s on.
    assert outcome.pod_seconds == 75 + 75 + 45
    assert outcome.replicas[PREFILL][:4] == [1, 1, 2, 2]


def test_too_much_for_one_pod_is_refused_until_there_are_more():
    busy = steady(1800, interval_s=0.1, num_prompt=4000)
    alone = simulate(busy, keep(1))
    scaled = simulate(busy, Scalers(by_utilization=False).scale, startup_s=15.0)
    assert alone.num_refused > 2 * scaled.num_refused > 0
    assert max(scaled.replicas[PREFILL]) >= 4


def test_a_fleet_shrinks_when_its_load_is_gone():
    load = [*steady(300, interval_s=0.1), Request(700.0, 100, 5, ())]
    outcome = simulate(load, Scalers(by_utilization=False).scale, startup_s=15.0)
    assert outcome.replicas[PREFILL][-1] == outcome.replicas[DECODE][-1] == 1
    assert outcome.num_requests == 301


def test_a_peak_is_three_times_its_surroundings():
    times = [request.arrival_s for request in with_peak(steady(600))]
    outside = sum(time < 99 for time in times)
    assert sum(100 < time < 199 for time in times) / outside > 2.9

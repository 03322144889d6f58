import random

from router.routing import DecodeView, PrefillView, choose_decode, choose_prefill


def prefill(worker_id, held=0, reported=0.0, predicted=0.0):
    return PrefillView(worker_id, held, reported, predicted)


def decode(worker_id, held=0, reported=0.0, predicted=0.0, free=1000):
    return DecodeView(worker_id, held, reported, predicted, free)


def prefill_choices(*views, num_blocks=10, avoid=()):
    """Every worker that chance may choose."""
    return {choose_prefill(views, num_blocks, random.Random(seed), avoid) for seed in range(40)}


def decode_choices(*views, num_blocks=10, avoid=()):
    return {choose_decode(views, num_blocks, random.Random(seed), avoid) for seed in range(40)}


def test_the_prefill_worker_with_the_longest_prefix_is_chosen():
    assert prefill_choices(prefill("a", held=2), prefill("b", held=5), prefill("c")) == {"b"}


def test_equal_prefixes_go_to_the_less_loaded_worker():
    assert prefill_choices(prefill("a", held=5, reported=3), prefill("b", held=5)) == {"b"}


def test_what_the_router_has_sent_since_the_report_counts_as_load():
    assert prefill_choices(prefill("a", held=5, predicted=3), prefill("b", held=5)) == {"b"}


def test_equal_prefill_workers_are_chosen_by_chance():
    assert prefill_choices(prefill("a"), prefill("b"), prefill("c", reported=1)) == {"a", "b"}


def test_a_prefix_is_not_worth_waiting_longer_than_it_saves():
    assert prefill_choices(prefill("a", held=5, reported=6), prefill("b")) == {"b"}
    assert prefill_choices(prefill("a", held=5, reported=5), prefill("b")) == {"a"}


def test_a_worker_of_unknown_load_is_neither_idle_nor_full():
    unknown = prefill("b", reported=None)
    busy, idle = prefill("c", reported=8), prefill("a", reported=0)
    assert prefill_choices(idle, unknown, busy) == {"a"}
    assert prefill_choices(unknown, prefill("c", reported=8), prefill("d", reported=4)) == {"d"}
    assert prefill_choices(unknown, busy, prefill("d", reported=9)) == {"c"}
    assert prefill_choices(prefill("b", held=1, reported=None), busy) == {"b"}


def test_a_worker_that_failed_comes_last_but_is_not_excluded():
    assert prefill_choices(prefill("a", held=9), prefill("b"), avoid={"a"}) == {"b"}
    assert prefill_choices(prefill("a", held=9), avoid={"a"}) == {"a"}
    assert decode_choices(decode("a", held=9), decode("b"), avoid={"a"}) == {"b"}


def test_without_workers_there_is_no_choice():
    assert choose_prefill([], 10, random.Random(0)) is None
    assert choose_decode([], 10, random.Random(0)) is None


def test_the_decode_worker_that_holds_more_is_chosen_when_load_is_equal():
    assert decode_choices(decode("a", held=3), decode("b", held=8)) == {"b"}


def test_the_decode_worker_with_fewer_sequences_is_chosen():
    assert decode_choices(decode("a", reported=3), decode("b", reported=2)) == {"b"}
    assert decode_choices(decode("a", predicted=1), decode("b")) == {"b"}


def test_a_shared_prefix_does_not_draw_all_sequences_to_one_decode_worker():
    assert decode_choices(decode("a", held=4, reported=2), decode("b")) == {"b"}


def test_a_decode_worker_without_room_comes_last():
    assert decode_choices(decode("a", held=2, free=7), decode("b", reported=9)) == {"b"}
    assert decode_choices(decode("a", held=2, free=8), decode("b", reported=9)) == {"a"}


def test_equal_decode_workers_go_by_free_blocks_and_then_by_chance():
    assert decode_choices(decode("a", free=500), decode("b"), decode("c")) == {"b", "c"}


def test_a_decode_worker_of_unknown_load_has_its_share_of_equal_choices():
    frozen = decode("frozen", reported=None, free=None)
    assert decode_choices(frozen, decode("known", free=1000)) == {"frozen", "known"}

"""Times between tokens, counted fast."""

from router.metrics import GapHistogram


def samples(histogram):
    (family,) = histogram.collect()
    return {
        (sample.name.removeprefix("gap_"), sample.labels.get("le")): sample.value
        for sample in family.samples
    }


def test_gaps_are_in_the_bucket_of_the_least_bound_that_is_no_less():
    histogram = GapHistogram("gap", "", (0.5, 1.0))
    for seconds in (0.5, 0.5, 0.75, 1.0, 4.0):
        histogram.gaps[seconds] += 1
    assert samples(histogram) == {
        ("bucket", "0.5"): 2,
        ("bucket", "1.0"): 4,
        ("bucket", "+Inf"): 5,
        ("count", None): 5,
        ("sum", None): 6.75,
    }
    histogram.gaps[0.5] += 1
    assert samples(histogram)["bucket", "0.5"] == 3


def test_many_different_gaps_do_not_pile_up_and_all_count():
    histogram = GapHistogram("gap", "", (1.0,))
    for number in range(10_000):
        histogram.gaps[number / 10_000] += 1
        assert len(histogram.gaps) <= 4096
    assert samples(histogram)["count", None] == 10_000

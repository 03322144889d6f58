"""What is read out of the times at which answers came."""

from __future__ import annotations

import pytest

from bench.serve_figures import Record, Slo, Window, figures, quantiles_ms


def served(due_s: float, *arrivals_s: float, sent_s: float | None = None) -> Record:
    """An answer with a token a message."""
    return Record(
        due_s=due_s,
        sent_s=due_s if sent_s is None else sent_s,
        arrivals_s=list(arrivals_s),
        num_tokens=len(arrivals_s),
        is_complete=True,
    )


ALL = Window(0.0, 10.0)


def test_a_late_client_is_not_hidden() -> None:
    record = served(1.0, 1.5, 1.6, sent_s=1.4)
    assert record.ttft_s == pytest.approx(0.5)
    assert figures([record], ALL, Slo())["sent_late_p50_ms"] == pytest.approx(400)


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it() -> None:
    assert served(0.0, 1.0, 1.1, 1.5).tpot_s == pytest.approx(0.25)
    assert served(0.0, 1.0).tpot_s is None


def test_tokens_that_come_together_count_each_for_tpot() -> None:
    record = served(0.0, 1.0, 2.0)
    record.num_tokens = 5
    assert record.tpot_s == pytest.approx(0.25)
    assert record.gaps_s() == [1.0]


def test_gaps_belong_to_the_interval_in_which_they_end() -> None:
    record = served(0.0, 1.0, 2.0, 4.0, 7.0)
    assert record.gaps_s(2.0, 7.0) == [1.0, 2.0]


def test_goodput_counts_what_was_served_in_time() -> None:
    records = [
        served(1.0, 1.1, 1.2),  # good
        served(2.0, 2.6, 2.7),  # its first token came late
        served(3.0, 3.1, 3.4),  # its other tokens came slowly
        Record(due_s=4.0, error="HTTP 429"),
        Record(due_s=5.0, arrivals_s=[5.1], num_tokens=1),  # never ended
    ]
    fields = figures(records, ALL, Slo(ttft_ms=500, tpot_ms=200))
    assert fields["goodput_per_s"] == pytest.approx(0.1)
    assert fields["good"] == pytest.approx(0.2)
    assert fields["served"] == 3 and fields["requests"] == 5


def test_without_limits_all_that_is_served_is_good() -> None:
    fields = figures([served(1.0, 9.0), served(2.0, 2.5, 9.5)], ALL, Slo())
    assert fields["good"] == 1.0


def test_an_answer_of_one_token_is_judged_by_its_first() -> None:
    assert Slo(ttft_ms=500, tpot_ms=1).is_met(served(1.0, 1.2))


def test_warm_up_counts_neither_for_latency_nor_for_throughput() -> None:
    records = [served(1.0, 4.0, 5.5), served(6.0, 6.2, 6.3)]
    fields = figures(records, Window(5.0, 10.0), Slo())
    assert fields["requests"] == 1
    assert fields["ttft_p99_ms"] == pytest.approx(200)
    # Of the one that was due in the warm-up, an output and the end came later.
    assert fields["output_tokens_per_s"] == pytest.approx(3 / 5)
    assert fields["served_per_s"] == pytest.approx(2 / 5)


def test_errors_are_counted_by_kind() -> None:
    records = [Record(due_s=1.0, error=kind) for kind in ("HTTP 429", "timeout", "HTTP 429")]
    fields = figures(records, ALL, Slo())
    assert (fields["error: HTTP 429"], fields["error: timeout"]) == (2, 1)
    assert fields["served"] == 0 and fields["ttft_p50_ms"] is None


def test_quantiles_are_in_milliseconds_and_named_so() -> None:
    values = [index / 1000 for index in range(1, 101)]
    assert quantiles_ms("itl", values) == {
        "itl_p50_ms": pytest.approx(50),
        "itl_p90_ms": pytest.approx(90),
        "itl_p99_ms": pytest.approx(99),
    }

"""bench.index runs: its figures mean nothing at this size."""

from bench.index import measure
from bench.index_load import Holdings, Shape
from bench.report import Reporter


async def test_a_tiny_run_measures_everything(capsys):
    reporter = Reporter("index", as_json=False)
    await measure(Shape(num_workers=5, num_entries=3000, prompt_blocks=256), reporter, 2)
    reporter.finish()
    shown = capsys.readouterr().out
    for name in ("inserts", "memory", "lookup, p99", "lookups", "evictions", "all lengths differ"):
        assert name in shown


def test_workers_hold_what_their_prompts_share_only_once():
    holdings = Holdings([[b"a", b"b"], [b"a", b"c"]], [{0: 2, 1: 1}, {0: 2}])
    assert holdings.of_workers(3) == [[b"a", b"b", b"c"], [b"a"], []]

"""Ways of moving blocks start in processes of their own and take turns."""

from __future__ import annotations

import pytest

from bench.kv_ways import SOCKET, Way, ready_way

SHAPE = (8, 4096)


@pytest.mark.parametrize(
    "way", [Way("tcp", "tcp"), Way("socket", SOCKET, buffer_bytes=65536)], ids=lambda way: way.name
)
def test_a_way_reads_and_copies_as_often_as_it_is_asked(way: Way) -> None:
    with ready_way(way, SHAPE) as ready:
        turns = [ready.turn(num_blocks) for num_blocks in (1, 8, 8)]
    assert all(turn.pull_s > 0 and turn.memcpy_s > 0 for turn in turns)


def test_an_owner_apart_is_read_as_well() -> None:
    try:
        with ready_way(Way("apart", "tcp", is_apart=True), SHAPE) as ready:
            assert ready.turn(8).pull_s > 0
    except PermissionError:
        pytest.skip("a PID namespace cannot be made here")


def test_a_way_that_cannot_start_ends_with_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EOFError), ready_way(Way("carrier pigeon", "pigeon"), SHAPE):
        pass
    assert "pigeon" in capfd.readouterr().err

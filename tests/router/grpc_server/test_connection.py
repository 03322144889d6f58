"""A connection whose transport is the test's: what is written when, and who counts as gone."""

from __future__ import annotations

import asyncio

import pytest

from core.http2.frames import ACK, Kind, frame
from router.grpc_server.connection import Connection, Shared
from tests.core.http2.wire import frames_in
from tests.router.grpc_server.peers import BEGINNING


class Transport:
    """Keeps what is written; `num_unsent` is what the system has not taken of it."""

    def __init__(self):
        self.writes = []
        self.num_unsent = 0
        self.is_reading = True
        self.is_aborted = self.is_at_end = False

    def write(self, data):
        assert not self.is_at_end
        self.writes.append(data)

    def get_write_buffer_size(self):
        return self.num_unsent

    def is_closing(self):
        return self.is_aborted

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True

    def write_eof(self):
        self.is_at_end = True

    def abort(self):
        self.is_aborted = True

    def kinds(self) -> list[int]:
        """Of the frames since the last time."""
        data, self.writes = b"".join(self.writes), []
        return [kind for kind, *_ in frames_in(data)]


@pytest.fixture
async def connected():
    """A connection and its transport, the beginning behind them."""
    connection, transport = Connection(Shared()), Transport()
    connection.connection_made(transport)
    connection.data_received(BEGINNING)
    await asyncio.sleep(0)
    assert transport.kinds() == [Kind.SETTINGS, Kind.WINDOW_UPDATE, Kind.SETTINGS]
    yield connection, transport
    connection.connection_lost(None)


async def test_what_one_turn_says_to_a_client_is_one_write(connected):
    connection, transport = connected
    connection.data_received(frame(Kind.PING, 0, 0, bytes(8)))
    connection.data_received(frame(Kind.PING, 0, 0, bytes(8)))
    assert transport.writes == []
    await asyncio.sleep(0)
    assert transport.writes == [frame(Kind.PING, ACK, 0, bytes(8)) * 2]


async def test_much_does_not_wait_for_the_end_of_the_turn(connected):
    connection, transport = connected
    connection.data_received(frame(Kind.PING, 0, 0, bytes(8)) * 20_000)
    assert len(transport.writes) == 1
    assert len(transport.writes[0]) == pytest.approx(1 << 18, abs=17)


async def test_a_client_that_does_not_read_is_not_heard(connected):
    connection, transport = connected
    connection.pause_writing()
    assert not transport.is_reading
    connection.resume_writing()
    assert transport.is_reading


async def test_a_client_that_says_something_is_not_asked(connected):
    connection, transport = connected
    connection.data_received(frame(Kind.PING, ACK, 0, bytes(8)))
    connection._ask_for_life()
    connection._outbox.flush()
    assert transport.kinds() == []


async def test_a_client_that_answers_stays(connected):
    connection, transport = connected
    connection._ask_for_life()
    connection._ask_for_life()
    connection._outbox.flush()
    assert transport.kinds() == [Kind.PING]
    connection.data_received(frame(Kind.PING, ACK, 0, bytes(8)))
    connection._look_for_life()
    assert not transport.is_aborted


async def test_a_client_that_does_not_answer_is_cut_off(connected):
    connection, transport = connected
    connection._ask_for_life()
    connection._ask_for_life()
    connection._outbox.flush()
    # The system takes the ping, whoever is at the other end.
    connection._look_for_life()
    assert transport.is_aborted


async def test_a_client_stays_while_it_reads(connected):
    connection, transport = connected
    transport.num_unsent = 1000
    connection._ask_for_life()
    connection._ask_for_life()
    transport.num_unsent = 900
    connection._look_for_life()
    assert not transport.is_aborted
    connection._ask_for_life()
    connection._look_for_life()
    assert transport.is_aborted


async def test_a_connection_that_ends_says_why_and_waits_for_the_client(connected):
    connection, transport = connected
    connection.data_received(frame(Kind.PING, 0, 1, bytes(8)))
    assert transport.kinds() == [Kind.GOAWAY]
    assert (transport.is_at_end, transport.is_aborted) == (True, False)
    connection.data_received(frame(Kind.PING, 0, 0, bytes(8)))
    await asyncio.sleep(0)
    assert transport.kinds() == []
    connection._leave()
    assert transport.is_aborted


async def test_a_connection_that_ends_waits_for_what_its_client_still_takes(connected):
    connection, transport = connected
    transport.num_unsent = 1000
    connection.go_away()
    transport.num_unsent = 900
    connection._leave()
    assert not transport.is_aborted


async def test_a_client_that_was_accepted_as_the_server_began_to_stop_is_sent_away():
    connection, transport = Connection(Shared(is_stopping=True)), Transport()
    connection.connection_made(transport)
    assert transport.kinds() == [Kind.SETTINGS, Kind.WINDOW_UPDATE, Kind.GOAWAY]
    assert transport.is_at_end
    connection.connection_lost(None)


async def test_going_away_is_told_once(connected):
    connection, transport = connected
    connection.go_away()
    connection.go_away()
    assert transport.kinds() == [Kind.GOAWAY]

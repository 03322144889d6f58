"""The hashes of a prompt, as placement makes them."""

import asyncio

import pytest

from core.hashing import block_hashes
from router import placement


@pytest.mark.parametrize("num_tokens", [0, 3, 16, 32, 33, 64, 70])
async def test_a_long_prompt_is_hashed_in_pieces_of_one_chain(monkeypatch, num_tokens):
    monkeypatch.setattr(placement, "_BLOCKS_AT_ONCE", 2)
    tokens = list(range(num_tokens))
    assert await placement._block_hashes(tokens, 16, b"scope") == block_hashes(tokens, 16, b"scope")


async def test_others_have_their_turn_between_the_pieces(monkeypatch):
    monkeypatch.setattr(placement, "_BLOCKS_AT_ONCE", 2)
    hashing = asyncio.ensure_future(placement._block_hashes(list(range(160)), 16, b"scope"))
    turns = 0
    while not hashing.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 5

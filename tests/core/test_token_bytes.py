"""Bytes of single tokens, for both ways that vocabularies write them."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from core.token_bytes import TokenBytes
from tests.model_folder import byte_tokenizer


def sentencepiece_like():
    tokens = ["<unk>", "▁the", "re", "<0x0A>", "<0xC3>", "▁"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def test_every_byte_of_a_byte_level_vocabulary_is_itself():
    tokenizer = byte_tokenizer()
    token_bytes = TokenBytes(tokenizer)
    assert sorted(token_bytes(token_id) for token_id in range(256)) == [
        bytes([byte]) for byte in range(256)
    ]
    assert b"".join(map(token_bytes, tokenizer.encode("é 🎉\n").ids)) == "é 🎉\n".encode()


def test_the_byte_alphabet_is_that_of_the_library():
    token_bytes = TokenBytes(byte_tokenizer())
    assert set(token_bytes._byte_of) == set(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(
    ("token_id", "data"), [(1, b" the"), (2, b"re"), (3, b"\n"), (4, b"\xc3"), (5, b" ")]
)
def test_sentencepiece_marks_spaces_and_bytes(token_id, data):
    assert TokenBytes(sentencepiece_like())(token_id) == data


def test_special_tokens_are_their_name_and_unknown_ids_nothing():
    token_bytes = TokenBytes(sentencepiece_like())
    assert token_bytes(6) == b"<s>"
    assert token_bytes(99) == b""
    assert TokenBytes(byte_tokenizer())(256) == b"<eos>"

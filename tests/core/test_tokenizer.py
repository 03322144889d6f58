import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from core.chat_template import ChatMessage
from core.detokenizer import detokenizers
from core.errors import InvalidArgument, StartupError
from core.model_folder import ModelFolder
from core.tokenizer import StopMatcher, Tokenizer
from tests.model_folder import EOS_TOKEN_ID, byte_tokenizer, write_model_folder


@pytest.fixture
def folder(tmp_path):
    return write_model_folder(tmp_path)


def load(folder):
    return Tokenizer(ModelFolder.load(folder))


def rewrite_tokenizer_config(folder, **content):
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


async def chat_text(folder, *contents):
    """The text that a chat of user messages becomes."""
    messages = [ChatMessage("user", content) for content in contents]
    tokens = await load(folder).encode_chat(messages, max_tokens=100)
    return byte_tokenizer().decode(tokens, skip_special_tokens=False)


@given(st.text())
def test_streamed_text_equals_the_text_of_all_tokens(text):
    raw = byte_tokenizer()
    detokenizer = detokenizers(raw)()
    pieces = [detokenizer.add(token_id) for token_id in raw.encode(text).ids]
    assert "".join(pieces) + detokenizer.flush() == raw.decode(raw.encode(text).ids)


@given(st.lists(st.integers(0, 299), max_size=40))
def test_any_bytes_stream_as_the_library_decodes_them(token_ids):
    raw = byte_tokenizer()
    raw.add_tokens(["naïve word", "é"])
    detokenizer = detokenizers(raw)()
    pieces = [detokenizer.add(token_id) for token_id in token_ids]
    assert "".join(pieces) + detokenizer.flush() == raw.decode(token_ids)


def test_a_character_is_emitted_whole():
    raw = byte_tokenizer()
    detokenizer = detokenizers(raw)()
    assert [detokenizer.add(token_id) for token_id in raw.encode("é🙂").ids] == [
        *["", "é"],
        *["", "", "", "🙂"],
    ]


def test_half_a_character_at_the_end_becomes_a_replacement_character():
    raw = byte_tokenizer()
    detokenizer = detokenizers(raw)()
    for token_id in raw.encode("a🙂").ids[:3]:
        detokenizer.add(token_id)
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


def test_bytes_that_are_no_text_are_not_held_back_for_ever():
    raw = byte_tokenizer()
    continuation_byte = raw.encode("é").ids[1]
    detokenizer = detokenizers(raw)()
    assert "�" in "".join(detokenizer.add(continuation_byte) for _ in range(100))


def test_a_look_knows_whole_characters_and_only_between_characters():
    raw = byte_tokenizer()
    detokenizer = detokenizers(raw)()
    a, *emoji = raw.encode("a🙂").ids
    texts = []
    for token_id in (a, *emoji, a):
        known = detokenizer.look(token_id)
        texts.append((known, detokenizer.add(token_id) if known is None else ""))
    assert texts == [("a", ""), (None, ""), (None, ""), (None, ""), (None, "🙂"), ("a", "")]


def test_special_tokens_leave_no_text():
    detokenizer = detokenizers(byte_tokenizer())()
    assert detokenizer.add(EOS_TOKEN_ID) + detokenizer.flush() == ""


def test_byte_fallback_tokens_stream_whole_characters():
    raw = RawTokenizer(models.BPE(vocab={"<0xC3>": 0, "<0xA9>": 1, "a": 2}, merges=[]))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = detokenizers(raw)()
    assert [detokenizer.add(token_id) for token_id in (2, 0, 1, 2)] == ["a", "", "é", "a"]


async def test_a_chat_is_rendered_up_to_the_assistants_turn(folder):
    assert await chat_text(folder, "hi") == "user:hi<eos>\nassistant:"


async def test_a_template_file_comes_before_the_tokenizer_config(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert await chat_text(folder, "hi") == "hi!"


async def test_the_default_of_named_templates_is_taken(folder):
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    rewrite_tokenizer_config(folder, chat_template=named)
    assert await chat_text(folder, "hi") == "yes"


async def test_special_tokens_may_be_objects_and_json_keeps_its_characters(folder):
    template = "{{ bos_token }}{% generation %}{{ messages[0] | tojson }}{% endgeneration %}"
    rewrite_tokenizer_config(folder, chat_template=template, bos_token={"content": "<s>"})
    assert await chat_text(folder, "é") == '<s>{"role": "user", "content": "é"}'


async def test_a_template_that_refuses_becomes_an_invalid_argument(folder):
    rewrite_tokenizer_config(folder, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidArgument, match="roles must alternate") as caught:
        await chat_text(folder, "hi")
    assert caught.value.field == "messages"


async def test_a_refusal_that_quotes_a_long_message_is_short(folder):
    rewrite_tokenizer_config(
        folder, chat_template="{{ raise_exception('bad: ' + messages[0]['content']) }}"
    )
    with pytest.raises(InvalidArgument, match="bad: xxx") as caught:
        await chat_text(folder, "x" * 100_000)
    assert len(caught.value.message) < 300


async def test_a_template_cannot_reach_into_python(folder):
    rewrite_tokenizer_config(folder, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidArgument, match="unsafe"):
        await chat_text(folder, "hi")


async def test_messages_without_a_template_are_refused(folder):
    rewrite_tokenizer_config(folder)
    with pytest.raises(InvalidArgument, match="no chat template"):
        await chat_text(folder, "hi")


def test_a_broken_template_stops_the_start(folder):
    rewrite_tokenizer_config(folder, chat_template="{% if %}")
    with pytest.raises(StartupError, match="chat template"):
        load(folder)


@pytest.mark.parametrize("content", [None, "{"])
def test_a_missing_or_broken_tokenizer_stops_the_start(folder, content):
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        load(folder)


async def test_a_long_prompt_is_encoded_whole_when_it_may_fit(folder):
    tokenizer = load(folder)
    assert await tokenizer.encode_prompt("ab" * 5000, max_tokens=9000) == tokenizer.encode(
        "ab" * 5000
    )


async def test_of_a_prompt_far_too_long_only_a_beginning_is_encoded(folder):
    assert len(await load(folder).encode_prompt("a" * 1_000_000, max_tokens=256)) == 4096


def stream(matcher, *pieces):
    return [matcher.add(piece) for piece in pieces] + [matcher.flush()]


def test_text_before_a_stop_string_is_emitted_and_the_rest_dropped():
    matcher = StopMatcher(["END"])
    assert stream(matcher, "one E", "N", "D two", "three") == ["one ", "", "", "", ""]
    assert matcher.is_stopped


def test_what_did_not_become_a_stop_string_is_emitted():
    assert stream(StopMatcher(["END"]), "E", "NO", "EN") == ["", "ENO", "", "EN"]


def test_the_earliest_of_several_stop_strings_counts():
    assert stream(StopMatcher(["cd", "b"]), "abcd") == ["a", ""]


def test_without_stop_strings_nothing_is_held_back():
    assert stream(StopMatcher([]), "a", "b") == ["a", "b", ""]


@given(
    st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3)
)
def test_streaming_cuts_where_the_whole_text_would_be_cut(pieces, stops):
    text = "".join(pieces)
    # A stop string counts at the moment in which it is complete.
    ends = [
        (text[:end], min(text[:end].find(stop) for stop in stops if stop in text[:end]))
        for end in range(len(text) + 1)
        if any(stop in text[:end] for stop in stops)
    ]
    matcher = StopMatcher(stops)
    shown = "".join(stream(matcher, *"".join(pieces)))
    assert shown == (text[: ends[0][1]] if ends else text)

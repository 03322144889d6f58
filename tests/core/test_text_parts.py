import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from core.model_folder import ModelFolder
from core.text_parts import cut, may_cut, text_frame
from core.tokenizer import Tokenizer as FolderTokenizer
from tests.model_folder import write_model_folder

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = st.text(st.sampled_from("abZ  \n'sé1.\u0301"), max_size=60)


def split(pattern, behavior="isolated"):
    return pre.Split(Regex(pattern), behavior)


def of_words(*steps):
    """A tokenizer whose tokens are whole words wherever two letters or a space are in them."""
    letters = sorted(pre.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ġ", "b"), ("ab", "Ġ"), ("b", "Ġ")]
    words = [*letters, *("".join(merge) for merge in merges)]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre.Sequence(list(steps))
    return tokenizer


GPT_2 = [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
NO_WORDS = pre.ByteLevel(add_prefix_space=False, use_regex=False)


@pytest.mark.parametrize("steps", [GPT_2, [split(LLAMA_3), NO_WORDS]])
@settings(max_examples=300)
@given(text=TEXTS, num_chars=st.integers(1, 9))
def test_parts_have_the_tokens_of_the_whole(steps, text, num_chars):
    tokenizer = of_words(*steps)
    tokenizer.normalizer = normalizers.NFC()
    assert may_cut(tokenizer)
    parts = cut(text, num_chars)
    assert "".join(parts) == text
    assert [i for part in parts for i in tokenizer.encode(part).ids] == tokenizer.encode(text).ids


def test_a_text_is_cut_between_two_letters_before_the_space():
    assert cut("one two, three 4 five six", 3) == ["one", " two, three 4 five", " six"]
    assert cut("one two, three 4 five six", 4) == ["one two, three 4 five", " six"]
    assert cut("", 4) == [""]


@pytest.mark.parametrize(
    "steps",
    [
        [NO_WORDS],
        [NO_WORDS, split(LLAMA_3)],
        [split(r"\w+ \w+"), NO_WORDS],
        [split(LLAMA_3, "removed"), NO_WORDS],
        [split(r"\w+ \w+"), pre.ByteLevel()],
        [pre.Metaspace(), pre.ByteLevel()],
        [pre.Metaspace()],
    ],
)
def test_a_text_whose_words_are_split_otherwise_is_not_cut(steps):
    assert not may_cut(of_words(*steps))


def test_a_normalizer_that_writes_spaces_otherwise_forbids_cuts():
    tokenizer = of_words(*GPT_2)
    tokenizer.normalizer = normalizers.Replace(" ", "_")
    assert not may_cut(tokenizer)


@pytest.mark.parametrize("token", [AddedToken("new york"), AddedToken("end", rstrip=True)])
def test_an_added_token_that_may_reach_over_a_cut_forbids_cuts(token):
    tokenizer = of_words(*GPT_2)
    tokenizer.add_tokens([AddedToken("<eos>", lstrip=True), "   "])
    assert may_cut(tokenizer)
    tokenizer.add_tokens([token])
    assert not may_cut(tokenizer)


def framed(template):
    tokenizer = of_words(*GPT_2)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def test_a_frame_is_what_stands_before_and_after_a_text():
    assert text_frame(framed("<s> $A </s>")) == ([261], [262])
    assert text_frame(of_words(*GPT_2)) == ([], [])
    assert text_frame(framed("<s>")) is None


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_a_long_text_is_encoded_as_a_short_one(tmp_path, add_special_tokens):
    folder = write_model_folder(tmp_path)
    raw = framed("<s> $A </s>")
    raw.save(str(folder / "tokenizer.json"))
    assert may_cut(raw)
    text = "ab bé ab 12 " * 2000
    token_ids = FolderTokenizer(ModelFolder.load(folder)).encode(
        text, add_special_tokens=add_special_tokens
    )
    assert token_ids == raw.encode(text, add_special_tokens=add_special_tokens).ids

import json

import pytest

from core.errors import StartupError
from core.model_folder import (
    DefaultSampling,
    ModelFolder,
    config_digest,
    model_digest,
    resolve_model,
    weight_files,
)
from tests.model_folder import write_model_folder


def load(folder, generation=None, **config):
    write_model_folder(folder, **config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelFolder.load(folder)


def test_the_config_says_architecture_vocabulary_and_context(tmp_path):
    folder = load(tmp_path / "tiny")
    assert folder.architecture == "LlamaForCausalLM"
    assert folder.vocab_size == 300
    assert folder.context_length == 256
    assert folder.served_name == "tiny"


@pytest.mark.parametrize(
    ("in_generation", "in_config", "expected"),
    [(7, 1, (7,)), ([7, 8], 1, (7, 8)), (None, 1, (1,)), (None, [1, 2], (1, 2)), (None, None, ())],
)
def test_the_generation_config_comes_first_for_end_tokens(
    tmp_path, in_generation, in_config, expected
):
    folder = load(tmp_path, {"eos_token_id": in_generation}, eos_token_id=in_config)
    assert folder.eos_token_ids == expected


def test_without_a_generation_config_decoding_is_greedy(tmp_path):
    assert load(tmp_path).default_sampling == DefaultSampling()


def test_sampling_defaults_count_only_when_the_folder_asks_for_sampling(tmp_path):
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1}
    assert load(tmp_path, given).default_sampling == DefaultSampling(repetition_penalty=1.1)
    assert load(tmp_path, given | {"do_sample": True}).default_sampling == DefaultSampling(**given)
    assert load(tmp_path, {"do_sample": True}).default_sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"architectures": None}, "`architectures` is missing"),
        ({"vocab_size": 0}, "`vocab_size` must be a positive integer"),
        ({"max_position_embeddings": "many"}, "`max_position_embeddings` must be"),
    ],
)
def test_a_config_that_lacks_something_is_one_clear_line(tmp_path, config, problem):
    with pytest.raises(StartupError, match=problem) as caught:
        load(tmp_path, **config)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("generation", "problem"),
    [
        ({"eos_token_id": "</s>"}, "`eos_token_id` must be a token id or a list of them"),
        ({"eos_token_id": [2, -1]}, "`eos_token_id` must be"),
        ({"eos_token_id": True}, "`eos_token_id` must be"),
        ({"do_sample": True, "top_k": float("nan")}, "`top_k` must be a number"),
        ({"do_sample": True, "top_k": 10**30}, "`top_k` must be a number"),
    ],
)
def test_a_generation_config_that_cannot_be_used_is_one_clear_line(tmp_path, generation, problem):
    with pytest.raises(StartupError, match=problem):
        load(tmp_path, generation)


def test_a_top_k_of_minus_one_is_off(tmp_path):
    assert load(tmp_path, {"do_sample": True, "top_k": -1}).default_sampling.top_k == 0


def test_broken_json_is_one_clear_line(tmp_path):
    write_model_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match=r"config\.json cannot be read"):
        ModelFolder.load(tmp_path)


def test_an_empty_folder_is_one_clear_line(tmp_path):
    with pytest.raises(StartupError, match=r"config\.json does not exist"):
        ModelFolder.load(tmp_path)


def test_a_folder_resolves_to_itself_and_a_missing_one_is_refused(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(StartupError, match="does not exist; give a Hugging Face model folder"):
        resolve_model(str(tmp_path / "missing"))


def test_a_hub_name_that_cannot_be_fetched_says_what_to_do(monkeypatch):
    def refuse(name, **_):
        raise OSError("no network\nmore")

    monkeypatch.setattr("core.model_folder.snapshot_download", refuse)
    with pytest.raises(StartupError, match=r"\(no network\); give the path") as caught:
        resolve_model("owner/model")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("with_weights", "patterns"),
    [(True, ["*.json", "*.jinja", "*.safetensors"]), (False, ["*.json", "*.jinja"])],
)
def test_weights_are_fetched_only_for_who_wants_them(tmp_path, monkeypatch, with_weights, patterns):
    def fetch(name, allow_patterns):
        assert (name, allow_patterns) == ("owner/model", patterns)
        return str(tmp_path)

    monkeypatch.setattr("core.model_folder.snapshot_download", fetch)
    assert resolve_model("owner/model", with_weights=with_weights) == tmp_path


def test_who_has_no_weights_knows_what_the_digest_begins_with(tmp_path):
    write_model_folder(tmp_path)
    start = config_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert len(start) == 32
    assert model_digest(tmp_path).startswith(start)
    write_model_folder(tmp_path, rope_theta=5.0)
    assert not model_digest(tmp_path).startswith(start)


def test_the_digest_tells_weights_and_configs_apart(tmp_path):
    write_model_folder(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    first = model_digest(tmp_path)
    assert first == model_digest(tmp_path)
    assert len(first) == 64

    changed = bytearray(3 << 20)
    changed[-1] = 1
    weights.write_bytes(changed)
    second = model_digest(tmp_path)
    write_model_folder(tmp_path, rope_theta=5.0)
    assert len({first, second, model_digest(tmp_path)}) == 3


def test_missing_weights_and_missing_shards_are_named(tmp_path):
    write_model_folder(tmp_path)
    with pytest.raises(StartupError, match=r"lacks the weights file model\.safetensors"):
        model_digest(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(StartupError, match=r"lacks the weights file model-2\.safetensors"):
        weight_files(tmp_path)

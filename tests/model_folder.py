"""A model folder without a model: config, tokenizer and chat template, made in a moment.

No torch: for tests of core and router. One token for each byte, so lengths are easy to count.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 300
EOS_TOKEN_ID = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}\n"
    "{{ message.role }}:{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes in the order of the byte-level alphabet; 256 is `<eos>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


def write_model_folder(folder: Path, **config: Any) -> Path:
    """Writes the folder; `config` overrides config.json, and None leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(_config_json(config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def _config_json(config: dict[str, Any]) -> str:
    content = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "eos_token_id": EOS_TOKEN_ID,
    } | config
    return json.dumps({key: value for key, value in content.items() if value is not None})


MODEL_DIGEST = hashlib.sha256(_config_json({}).encode()).hexdigest()[:32] + "0" * 32
"""Of a model with the default config and some weights or other."""

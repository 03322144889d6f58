"""Which kernels an engine runs on: PyTorch's own, or on a CPU the faster ones, if they go.

On a GPU, `engine.gpu_runner` has others for all but the matrices.

What does not go is named in a line of the log, and PyTorch does it instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from core.errors import StartupError
from engine.attention import AttentionBackend, GatherAttention
from engine.attention.native import NativeAttention, unsupported
from engine.decoder import Decoder, DecoderWeights
from engine.kv_cache import KVCache
from engine.linear import Linear, pack, packing_error
from engine.matrices import MatrixStorage, QuantizedKernels
from engine.model_config import ModelConfig
from engine.native.build import BuildError, build, default_cache
from engine.native.decoder import NativeDecoder, is_packed
from engine.native.library import DTYPES, Library
from engine.native.linear import NativePacker
from engine.native.ops import NativeOps
from engine.native.quantized import NativeQuantizer
from engine.ops import DecoderOps, TorchOps
from engine.quantization.weight import Code

CHOICES = ("auto", "native", "torch")


@dataclass(frozen=True)
class Kernels:
    """What was chosen."""

    ops: DecoderOps
    pack: Callable[[Linear], None] | None
    quantized: QuantizedKernels | None
    library: Library | None

    def storage(self, dtype: torch.dtype, scheme: Code | None = None) -> MatrixStorage:
        """For matrices of layers in the codes of `scheme`, or as the checkpoint has them."""
        return MatrixStorage(dtype, self.pack, self.quantized, scheme)

    def attention(
        self, cache: KVCache, num_heads: int, progress: Callable[[str], None]
    ) -> AttentionBackend:
        """For a model with `num_heads` query heads."""
        if self.library is None:
            return GatherAttention(cache)
        if reason := unsupported(self.library, cache.shape, num_heads):
            progress(f"attention with PyTorch's kernels: {reason} is not supported by others")
            return GatherAttention(cache)
        return NativeAttention(cache, self.library)

    def decoder(self, config: ModelConfig, weights: DecoderWeights) -> Decoder:
        """Whole layers at once where the kernels know all that is in them."""
        if self.library is not None and is_packed(weights):
            return NativeDecoder(config, weights, self.library)
        return Decoder(config, weights, self.ops)


def choose_kernels(
    wanted: str, dtype: torch.dtype, device: torch.device, progress: Callable[[str], None]
) -> Kernels:
    """ "torch": PyTorch's own. "native": compiled for this CPU, or StartupError. "auto": compiled
    where that goes. Compiling takes seconds, once a machine."""
    if wanted not in CHOICES:
        raise StartupError(f"cpu_kernels {wanted} is not known; choose {', '.join(CHOICES)}")
    if device.type == "cuda":
        from engine.triton_linear import TritonQuantizer  # Needs Triton, which a CPU does not.

        return Kernels(TorchOps(), None, TritonQuantizer.on(device), None)
    if wanted == "torch":
        return Kernels(TorchOps(), None, None, None)
    try:
        library = _library(dtype)
    except BuildError as error:
        if wanted == "native":
            raise StartupError(f"no compiled kernels: {error}") from error
        progress(f"PyTorch's kernels instead of compiled ones: {error}")
        return Kernels(TorchOps(), _onednn(dtype, progress), None, None)
    progress("kernels compiled for this CPU")
    quantized = NativeQuantizer(library) if library.packs else None
    if library.packs and not library.has_matrix_unit:
        return Kernels(NativeOps(library), NativePacker(library, dtype), quantized, library)
    return Kernels(NativeOps(library), _onednn(dtype, progress), quantized, library)


def _onednn(dtype: torch.dtype, progress: Callable[[str], None]) -> Callable[[Linear], None] | None:
    reason = packing_error(dtype)
    if reason is None:
        return pack
    progress(f"matrices are not packed: {reason}")
    return None


def _library(dtype: torch.dtype) -> Library:
    if dtype not in DTYPES:
        raise BuildError(f"dtype {dtype} is not supported")
    return Library(build(default_cache()), dtype)

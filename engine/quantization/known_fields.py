"""Fields of `quantization_config` that do not change what weights mean.

They say how weights were computed, which modules have been left alone, or how other engines are
to run them.
"""

from __future__ import annotations

OF_ALL = frozenset({"quant_method", "modules_to_not_convert", "meta"})
OF_GPTQ = frozenset(
    {
        *("act_group_aware", "autoround", "backend", "batch_size", "block_name_to_quantize"),
        *("cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "desc_act"),
        *("exllama_config", "lm_head", "max_input_length", "model_file_base_name"),
        *("model_name_or_path", "model_seqlen", "module_name_preceding_first_block"),
        *("modules_in_block_to_quantize", "mse", "offload_to_disk", "offload_to_disk_path"),
        *("pack_impl", "pad_token_id", "parallel_packing", "quantizer", "static_groups", "sym"),
        *("tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "v2", "vram_strategy"),
    }
)
OF_AWQ = OF_GPTQ | {"do_fuse", "fuse_max_seq_len", "modules_to_fuse"}
OF_FP8 = frozenset(
    {
        *("activation_scheme", "dequantize", "expert_dtype", "ignored_layers"),
        *("modules_to_convert", "scale_fmt"),
    }
)
OF_COMPRESSED = frozenset({"global_compression_ratio", "ignore", "quantization_status", "version"})
OF_COMPRESSED_WEIGHTS = frozenset(
    {"block_structure", "group_size", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
)

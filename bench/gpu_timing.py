"""Times on a GPU, or on a CPU for dry runs, and what the device does at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from bench.gpu_model import Rates

_GIB = 1 << 30


def median_s(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of `work`, whatever it launches included, after two runs to warm up."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Copies and multiplies for about a second."""
    is_gpu = device.type == "cuda"
    num_bytes, size, repeats = (4 * _GIB, 8192, 10) if is_gpu else (1 << 26, 256, 3)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device, repeats)
    left = torch.randn(size, size, dtype=torch.float32, device=device).to(dtype)
    product = torch.empty_like(left)
    product_s = median_s(lambda: torch.matmul(left, left, out=product), device, repeats)
    return Rates(2 * num_bytes / copy_s, 2 * size**3 / product_s)


def free_bytes(device: torch.device) -> int:
    """Memory that the device can still give; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    _synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Python client of Baton.

>>> from client import BatonClient
>>> with BatonClient("127.0.0.1:50051") as baton:
...     print(baton.generate("The sky is", max_tokens=8).text)

`AsyncBatonClient` is the same for asyncio. Every failure is one of `core.errors`.
"""

from client._async import AsyncBatonClient, AsyncCompletionStream
from client._options import DEFAULT_SERVER, GenerateOptions
from client._results import Choice, Chunk, Completion, Route, Timing, TokenLogprobs, Usage
from client._sync import BatonClient, CompletionStream

__all__ = [
    "DEFAULT_SERVER",
    "AsyncBatonClient",
    "AsyncCompletionStream",
    "BatonClient",
    "Choice",
    "Chunk",
    "Completion",
    "CompletionStream",
    "GenerateOptions",
    "Route",
    "Timing",
    "TokenLogprobs",
    "Usage",
]

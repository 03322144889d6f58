"""The shortest way of a token's text to its client: past tasks, to the end of the loop's turn.

A stream's follower pulls chunks (router/follower.py). While its client keeps up, and there is
nothing to its tokens but text, each text goes down the stream's lane in the moment in which it
comes. This runs for every token of every stream: what costs is each object that it touches.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable


class TextBatch(list["TextLane"]):
    """Lanes with a text that goes out at the end of the loop's turn, in order.

    One write after the other, with little computed between, finds the clients awake: waking a
    process costs more than the rest of a write.
    """

    __slots__ = ()

    def schedule(self) -> None:
        """To be called before the first lane is appended."""
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Sends what waits."""
        waiting = self.copy()
        self.clear()
        for lane in waiting:
            text, lane.text = lane.text, ""
            try:
                lane.send(text)
            except Exception:  # others wait behind it
                lane.failed()


class TextLane(ABC):
    """Takes the texts of one stream, one after the other."""

    __slots__ = ("batch", "on_full", "text")

    def __init__(self, batch: TextBatch) -> None:
        self.batch = batch
        self.text = ""
        """What waits for the end of the turn; the lane is in `batch` while there is any."""
        self.on_full: Callable[[], None] | None = None
        """Who knows of it calls this when the client does not keep up: no more texts for now."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether the client does not keep up."""

    @abstractmethod
    def send(self, text: str) -> None:
        """Sends `text` at once, however much waits already. May raise anything."""

    @abstractmethod
    def failed(self) -> None:
        """To be called where `send` has raised an exception, which is handled here."""

    def put(self, text: str) -> None:
        """Has `text`, which is not empty, sent at the end of the loop's turn."""
        if self.text:
            self.text += text
            return
        self.text = text
        batch = self.batch
        if not batch:
            batch.schedule()
        batch.append(self)

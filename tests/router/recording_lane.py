"""A lane whose texts end in a list."""

from __future__ import annotations

from router.text_lane import TextBatch, TextLane


class RecordingLane(TextLane):
    """`is_full` is the tests' to set; `fill` is a client that stops to read meanwhile."""

    is_full = False

    def __init__(self) -> None:
        super().__init__(TextBatch())
        self.texts: list[str] = []

    @property
    def sent(self) -> list[str]:
        """All texts so far, without waiting for the loop's turn to end."""
        self.batch.flush()
        return self.texts

    def fill(self) -> None:
        self.is_full = True
        if self.on_full is not None:
            self.on_full()

    def send(self, text: str) -> None:
        self.texts.append(text)

    def failed(self) -> None:
        raise AssertionError("nothing fails here")

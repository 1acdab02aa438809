"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine.errors import BadRequest


def stop_list(stop: str | Sequence[str]) -> list[str]:
    """`stop` as a list. Raises `BadRequest` for anything but non-empty strings."""
    if not isinstance(stop, (str, list, tuple)):
        raise BadRequest(f"stop must be a string or strings, not {type(stop).__name__}")
    stops = [stop] if isinstance(stop, str) and stop else list(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise BadRequest("stop must be a string or strings, none of them empty")
    return stops


class StopStrings:
    """Finds the first complete stop string, however the text is cut into pieces.

    If one character completes several, the longest counts. Text that may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._held_max = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self.match: str | None = None

    def push(self, text: str) -> str:
        """The text that is final now. Empty after a match."""
        if self.match is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(place + len(stop), place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            _, place, self.match = min(found)
            self._held = ""
            return text[:place]
        for length in range(min(self._held_max, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                self._held = text[-length:]
                return text[:-length]
        self._held = ""
        return text

    def finish(self) -> str:
        """The text that was held back, if it became no stop string."""
        held, self._held = self._held, ""
        return held

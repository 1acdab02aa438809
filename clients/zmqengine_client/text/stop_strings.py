"""Stop strings in streamed text."""

from __future__ import annotations

from collections import deque
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


class StopAutomaton:
    """The Aho-Corasick automaton of a request's stop strings, which all of its choices share.

    Building it and reading text with it are linear in the characters. Node 0 is the root. `edges` is the trie, `fall`
    the node of a node's longest proper suffix, `depth` the characters to a node, `ends` the longest stop string that
    ends at a node, if any. Source: Aho, Corasick: Efficient String Matching, CACM 18 (1975).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.edges: dict[tuple[int, str], int] = {}
        self.depth = [0]
        self.ends: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self.fall = [0] * len(self.depth)
        self._set_falls()

    def __bool__(self) -> bool:
        """Whether there is any stop string."""
        return bool(self.edges)

    def after(self, node: int, character: str) -> int:
        """The node after one more character. Amortised constant: a fall takes back an earlier step."""
        edges = self.edges
        while (following := edges.get((node, character))) is None:
            if not node:
                return 0
            node = self.fall[node]
        return following

    def _add(self, stop: str) -> None:
        node = 0
        for character in stop:
            following = self.edges.setdefault((node, character), len(self.depth))
            if following == len(self.depth):
                self.depth.append(self.depth[node] + 1)
                self.ends.append(None)
            node = following
        self.ends[node] = stop

    def _set_falls(self) -> None:
        """Set the falls in breadth-first order; a node without a stop string takes that of its fall."""
        children: list[list[tuple[str, int]]] = [[] for _ in self.depth]
        for (node, character), child in self.edges.items():
            children[node].append((character, child))
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for character, child in children[node]:
                if node:
                    self.fall[child] = self.after(self.fall[node], character)
                if self.ends[child] is None:
                    self.ends[child] = self.ends[self.fall[child]]
                waiting.append(child)


class StopStrings:
    """Finds the first complete stop string, however the text is cut into pieces.

    If one character completes several, the longest counts. Text that may still become a stop string is held back.
    """

    def __init__(self, stops: StopAutomaton) -> None:
        self._stops = stops
        self._node = 0
        self._held = ""
        self.match: str | None = None

    def push(self, text: str) -> str:
        """The text that is final now. Empty after a match."""
        if self.match is not None:
            return ""
        if not self._stops:
            return text
        after, ends, node = self._stops.after, self._stops.ends, self._node
        whole = self._held + text
        for index, character in enumerate(text, len(self._held) + 1):
            node = after(node, character)
            match = ends[node]
            if match is not None:
                self.match, self._held = match, ""
                return whole[: index - len(match)]
        self._node = node
        final = len(whole) - self._stops.depth[node]
        self._held = whole[final:]
        return whole[:final]

    def finish(self) -> str:
        """The text that was held back, if it became no stop string."""
        held, self._held = self._held, ""
        return held

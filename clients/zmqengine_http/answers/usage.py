"""How many tokens a request took, and how long they took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Usage:
    """Counts over all choices; a prompt counts once, however many choices it has.

    `completion` holds every token the model made, reasoning and end tokens too. `drafted` tokens were proposed to it;
    those accepted are among them. The worker's times are those of the choice that took longest in all.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    drafted: int = 0
    drafted_accepted: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0

    def take_times(self, queue_ms: float, prefill_ms: float, decode_ms: float) -> None:
        """Those of a choice."""
        if queue_ms + prefill_ms + decode_ms > self.queue_ms + self.prefill_ms + self.decode_ms:
            self.queue_ms, self.prefill_ms, self.decode_ms = queue_ms, prefill_ms, decode_ms

"""Cost model of a step, in place of an engine."""

from __future__ import annotations

from benchmarks.schedule.options import ScheduleOptions


class Machine:
    """Seconds of a step, linear in rows, KV cache tokens and prompt tokens, as measured on batching engines."""

    def __init__(self, options: ScheduleOptions) -> None:
        self._step_s = options.step_ms / 1e3
        self._row_s = options.step_row_us / 1e6
        self._kv_token_s = options.step_kv_us / 1e9
        self._prompt_token_s = 1 / options.prefill_tokens_per_s
        self._rows = options.rows

    def step_s(self, rows: int, kv_tokens: int, prompt_tokens: int) -> float:
        """Seconds of one step: `rows` decode a token each over `kv_tokens` of cache, `prompt_tokens` are prefilled."""
        decode_s = self._step_s + rows * self._row_s + kv_tokens * self._kv_token_s if rows else 0.0
        return decode_s + prompt_tokens * self._prompt_token_s

    def work_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds that a request adds to a full batch."""
        return prompt_tokens * self._prompt_token_s + output_tokens * self._token_s(
            prompt_tokens + output_tokens / 2
        )

    @property
    def prefill_cost(self) -> float:
        """Cost of a prefill token relative to a decode token in a full batch."""
        return self._prompt_token_s / self._token_s(0)

    def _token_s(self, kv_tokens: float) -> float:
        return self._step_s / self._rows + self._row_s + kv_tokens * self._kv_token_s

"""One step: decode every row, then prefill one bounded chunk of prompt."""

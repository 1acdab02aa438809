"""The markers of both bundled models' chat templates, each a token."""

END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, SYSTEM)

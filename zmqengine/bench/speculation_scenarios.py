"""The work of `bench speculation` and the measures a short table shows of it."""

SPECULATION: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("echo", "edit", "edit draft", "new text", "sampled text", "set drafts", "draft model"),
    ("tokens_per_s", "full_tokens_per_s", "steps_per_token", "accepted_share"),
)

"""The scenario of `bench saving` and the measures a short table shows of it."""

SAVING: dict[str, tuple[str, ...]] = {"saving": ("tokens_per_s", "wall_s", "written_bytes")}

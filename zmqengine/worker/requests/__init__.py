"""A live request: its state, scheduling facts, token log and deadline, and the compiler of its constraint."""

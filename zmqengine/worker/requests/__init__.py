"""One live request: its state, scheduling facts and token log, its deadline, and the compiler of its constraint."""

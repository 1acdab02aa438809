"""One live request: its state, scheduling facts and token log, its deadline, and its preparation off the actor."""

"""One live request: its state, preparation off the actor, token log and recovery after a failed step."""

"""Intake: commands for the actor, and requests that the control thread answers."""

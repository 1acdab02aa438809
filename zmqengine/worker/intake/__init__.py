"""Everything that front-ends ask: commands for the actor, and questions that the control thread answers."""

"""What the endpoints of OpenAI's API have in common."""

"""From messages and texts to token ids, on threads."""

"""Conversations as chat templates read them: one rendering for the client and for the HTTP front-end."""

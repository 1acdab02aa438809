"""From tokens to answer events, and from events to a response body."""

"""The workers behind this front-end: their clients, their state, and which one takes a request."""

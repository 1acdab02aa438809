"""The workers behind this front-end: connections, state, and the choice of a worker for a request."""

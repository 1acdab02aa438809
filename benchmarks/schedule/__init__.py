"""The order of service replayed without an engine: arrivals, a model of what steps cost, and who waits how long."""

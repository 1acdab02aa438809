"""The worker's sockets: binding, keys, connection limits, sessions and outgoing frames."""

"""HTTP itself: exchanges, bodies, access control, errors, logs, metrics and traces."""

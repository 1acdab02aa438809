"""HTTP itself: exchanges, bodies, access control, server-sent events, logs and traces."""

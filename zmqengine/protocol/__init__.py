"""The wire: messages, codec and addresses. No sockets and no MLX. SPEC.md is the authority."""

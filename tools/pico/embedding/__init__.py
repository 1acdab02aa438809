"""Training of pico-embed, the bundled model that turns sentences into vectors."""

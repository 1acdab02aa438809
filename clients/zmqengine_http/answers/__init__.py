"""The choices of a response: tokens to text, text to events, events to bytes."""

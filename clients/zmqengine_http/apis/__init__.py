"""The HTTP APIs, one folder each: OpenAI's, Anthropic's and the operational endpoints."""

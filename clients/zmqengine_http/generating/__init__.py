"""The API-neutral request that every API is translated to, and its generation."""

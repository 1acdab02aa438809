"""The one inner request that every API is translated to."""

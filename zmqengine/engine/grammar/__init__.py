"""Constrained decoding: JSON schemas, grammars, regular expressions, choices.

`grammar.py` compiles a constraint on a thread beside the actor. `matcher.py` follows the output of one row, token by
token, and `thinking.py` its reasoning, which may have a bound. `mask.py` fills the masks of allowed next tokens for all
rows while the forward pass runs; only that file touches MLX. The parser is llguidance
(https://github.com/guidance-ai/llguidance).
"""

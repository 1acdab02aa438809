"""Output that is right by construction: JSON schemas, grammars, regular expressions, choices.

`grammar.py` compiles what a request asks for; the worker does that on a thread beside the actor. `matcher.py` follows
one row, token by token. `mask.py` says for many rows at once which tokens may come next, while the forward pass runs,
and rules out the others: only that file touches MLX. The parsing itself is llguidance's
(https://github.com/guidance-ai/llguidance).
"""

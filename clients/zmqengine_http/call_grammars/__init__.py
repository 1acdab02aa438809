"""Grammars for tool calls, in the words of each model family.

`lark.py` writes rules for a model's tokens; `frames.py` has what stands around the arguments in each format
that `tool_calls/formats.py` can read; `written_values.py` has arguments that are not JSON, and `bare_text.py`
those without even quotes. `harmony.py` has the channels of gpt-oss, and `answers.py` puts calls, text and
JSON together to answers.
"""

"""Lark grammars of tool calls, in the format of each model family.

`lark.py` writes grammar rules for one model's tokens; `frames.py` reads the layouts of the formats in `tool_calls`, the
syntax around arguments; `literal_values.py` has arguments as Python or Gemma literals, `tagged_values.py`
those as bare text between tags. `answer_grammar.py` combines calls, text and JSON to the grammar of an
output. `schema_keywords.py` lists the keywords of JSON Schema that a grammar cannot enforce.
"""

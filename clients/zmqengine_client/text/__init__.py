"""Text to token ids and back, with the tokenizer that the worker provides.

prompts.py            text or messages of a caller to the prompt of a request
text_reader.py        token ids of a request to chunks of text
tokenizer.py          text to token ids and back
chat_template.py      conversations to text
segment_cache.py      cached token ids of segments of long prompts
tool_calls            text of an answer to content, reasoning and tool calls
detokenizer.py        token ids to text, incrementally; the bytes of a token
stop_strings.py       stop strings in streamed text
tokenizer_cache.py    tokenizers fetched from workers, in memory and on disk
"""

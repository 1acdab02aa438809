"""From text to token ids and back, with the tokenizer that the worker hands out.

prompts.py            from what a caller gives to the prompt of a request
text_reader.py        from a request to chunks of text
tokenizer.py          text to token ids and back
chat_template.py      conversations to text
segment_cache.py      token ids of the parts of long prompts, kept
detokenizer.py        token ids to text, piece by piece
byte_detokenizer.py   the same where a token is bytes of its own
stop_strings.py       finds them in text that arrives in pieces
token_bytes.py        the bytes that one token stands for
tokenizer_cache.py    what workers sent, in this process and on disk
"""

"""Text to token ids and back, with the tokenizer that the worker provides.

prompts.py            text or messages of a caller to the prompt of a request
text_reader.py        token ids of a request to chunks of text
answer_text.py        token ids to content, reasoning and tool calls, up to a stop string
tokenizer.py          text to token ids and back
chats                 messages of a caller, adapted to what a chat template takes, to text
chat_template.py      templates in a sandbox
segment_cache.py      cached token ids of segments of long prompts
tool_calls            text of an answer to content, reasoning and tool calls
decisions.py          questions about one state, and the probabilities of given answers
detokenizer.py        token ids to text, incrementally; the bytes of a token
stop_strings.py       stop strings in streamed text
tokenizer_cache.py    tokenizers fetched from workers, in memory and on disk
"""

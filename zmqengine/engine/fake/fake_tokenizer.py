"""A tokenizer for the fake engine, so that text-level front-ends can be tested without a model.

Ids 1 to 256 are the 256 bytes, id 0 ends the output, every further id is a word of its own. Any text
round-trips: it is encoded byte by byte.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<end>"
IMAGE = "<image>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

VISION_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}",
)
"""The template of a fake engine that sees."""


def fake_tokenizer_json(vocab_size: int, *, vision: bool = False) -> bytes:
    """A tokenizer in the format of the `tokenizers` library with `vocab_size` (at least 257) ids.

    With `vision` id 257 is that of an image, and there are at least 260 ids.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [END, *alphabet, *(f"Ġw{index}" for index in range(257, vocab_size))]
    if vision:
        words[257] = IMAGE
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    if vision:
        tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    return tokenizer.to_str().encode()

"""The client library of zmqengine: `Client` and `AsyncClient` stream from a worker that runs somewhere else.

    with Client() as client:
        for chunk in client.generate("Once upon", max_tokens=50):
            print(chunk, end="")

It never imports MLX.
"""

from zmqengine.protocol.messages import Description, Status, ThinkingMax, TokenLogprob
from zmqengine_client import errors
from zmqengine_client.aio.client import AsyncClient
from zmqengine_client.aio.group import AsyncGroup, AsyncNews
from zmqengine_client.aio.streams import AsyncTextStream, AsyncTokenStream
from zmqengine_client.core.chunks import Completion, PromptProgress, TextChunk, TokenChunk, ToolCall
from zmqengine_client.core.embedding import Embedded, EmbedOptions, Ranked
from zmqengine_client.core.options import Options
from zmqengine_client.core.outbox import ClientCounters, ClientEvent
from zmqengine_client.keys import CurveKeys, load_keys
from zmqengine_client.sync.client import Client
from zmqengine_client.sync.group import Group, News
from zmqengine_client.sync.streams import TextStream, TokenStream
from zmqengine_client.text.decisions import Answered, Decisions, OneOf, Score, YesNo
from zmqengine_client.text.detokenizer import Detokenizer
from zmqengine_client.text.tokenizer import Tokenizer

__all__ = [
    "Answered",
    "AsyncClient",
    "AsyncGroup",
    "AsyncNews",
    "AsyncTextStream",
    "AsyncTokenStream",
    "Client",
    "ClientCounters",
    "ClientEvent",
    "Completion",
    "CurveKeys",
    "Decisions",
    "Description",
    "Detokenizer",
    "EmbedOptions",
    "Embedded",
    "Group",
    "News",
    "OneOf",
    "Options",
    "PromptProgress",
    "Ranked",
    "Score",
    "Status",
    "TextChunk",
    "TextStream",
    "ThinkingMax",
    "TokenChunk",
    "TokenLogprob",
    "TokenStream",
    "Tokenizer",
    "ToolCall",
    "YesNo",
    "errors",
    "load_keys",
]

"""Keeps the heads of a conversation's prompts identical from turn to turn, so that the prefix cache hits."""

from zmqengine_http.stable_head.answer_memory import AnswerMemory, RememberingWriter
from zmqengine_http.stable_head.head import HeadChanges, StableHead, StableHeadResult

__all__ = ["AnswerMemory", "HeadChanges", "RememberingWriter", "StableHead", "StableHeadResult"]

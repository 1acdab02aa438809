"""Makes the prompts of one conversation begin alike, so that a worker's prompt cache finds them."""

from zmqengine_http.stable_head.answer_memory import AnswerMemory
from zmqengine_http.stable_head.head import HeadChanges, Stabilised, StableHead
from zmqengine_http.stable_head.remembering import RememberingWriter

__all__ = ["AnswerMemory", "HeadChanges", "RememberingWriter", "Stabilised", "StableHead"]

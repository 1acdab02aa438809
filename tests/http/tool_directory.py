"""The bundled model with a template that knows tools and marks of reasoning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from zmqengine.pico import model_path

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call> </tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    "{% if enable_thinking %}<think>\n{% endif %}"
)
# A schema of few answers.
MOOD: Any = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}


def tool_directory(models: Path, template: str = TEMPLATE) -> Path:
    """The bundled model, below `models`, with a template that knows tools and marks of reasoning."""
    directory = Path(shutil.copytree(model_path(), models / "tools"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(with_thinking(tokenizer)))
    return directory


def with_thinking(tokenizer: Any) -> Any:
    """The marks of reasoning in place of the two words that were learnt last: no special tokens, as in most models."""
    words, last = (
        tokenizer["model"]["vocab"],
        sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1]),
    )
    for mark, (word, id_) in zip(("<think>", "</think>"), last[-2:], strict=True):
        del words[word]
        words[mark] = id_
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": id_, "content": mark, **plain})
    del tokenizer["model"]["merges"][-2:]
    return tokenizer

"""lm-evaluation-harness on a front-end: a multiple-choice task, scored by echoed log-probabilities.

    python lm_eval_checks.py URL MODEL TOKENIZER

The data is made here. Of the answers to a question one is the model's own and the others are words that it never says
there: a model that is asked rightly prefers its own, so the accuracy is 1. TOKENIZER is the directory of the model's.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import lm_eval  # type: ignore[import-not-found, unused-ignore]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]

QUESTIONS = ["Once upon a time there was", "The little dog ran to", "She looked at the", "One day a girl"]
WRONG = [" quarterly", " xylophone zzz"]
CHOICE = """\
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def ask(url: str, **body: Any) -> Any:
    """One request for a completion."""
    request = Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=300) as reply:
        return json.load(reply)


def check(name: str, found: object, wanted: object) -> None:
    """Print the result of a check as a line of JSON."""
    error = "" if found == wanted else f"{found!r} instead of {wanted!r}"
    print(json.dumps({"name": name, "error": error}), flush=True)


def main(url: str, model: str, tokenizer: str) -> None:
    """Run the task and a check of the sums."""
    docs: list[dict[str, Any]] = []
    for question in QUESTIONS:
        said = ask(url, model=model, prompt=question, max_tokens=3, temperature=0)["choices"][0]["text"]
        docs.append({"question": question, "choices": [WRONG[0], said, WRONG[1]], "answer": 1})
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data.jsonl")
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        Path(folder, "local_choice.yaml").write_text(CHOICE.format(data=data))
        settings = {
            "model": model,
            "base_url": f"{url}/v1/completions",
            "num_concurrent": 2,
            "max_retries": 1,
        }
        settings |= {"tokenizer": tokenizer, "tokenizer_backend": "huggingface"}
        result = lm_eval.simple_evaluate(
            model="local-completions", model_args=settings, tasks=["local_choice"], batch_size=1,
            task_manager=TaskManager(include_path=folder), bootstrap_iters=0, log_samples=True,
        )  # fmt: skip
    check("accuracy", result["results"]["local_choice"]["acc,none"], 1.0)
    first = result["samples"]["local_choice"][0]
    scored, is_greedy = first["filtered_resps"][1]
    check("the model's own answer is greedy", bool(is_greedy), True)
    whole = ask(
        url,
        model=model,
        prompt=docs[0]["question"] + docs[0]["choices"][1],
        max_tokens=0,
        echo=True,
        logprobs=1,
    )
    logprobs = whole["choices"][0]["logprobs"]
    start = next(
        place for place, offset in enumerate(logprobs["text_offset"]) if offset >= len(docs[0]["question"])
    )
    check(
        "its log-probability",
        math.isclose(float(scored), sum(logprobs["token_logprobs"][start:]), abs_tol=1e-3),
        True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The corpus comes from its seed alone, and its two splits do not meet."""

import subprocess
import sys

import pytest

from tools.pico import corpus
from tools.pico.chat import Turn
from tools.pico.corpus import ChatDocument, StoryDocument
from tools.pico.draw import Split, split_of


def _turns(documents: list[corpus.Document]) -> list[Turn]:
    return [turn for document in documents if isinstance(document, ChatDocument) for turn in document.turns]


def test_the_same_seed_gives_the_same_corpus_in_another_process() -> None:
    """A fresh interpreter, whose string hashes differ, writes the same documents."""
    script = (
        "import hashlib\n"
        "from tools.pico import corpus\n"
        "texts = [document.text for document in corpus.sample('train', 7, 200)]\n"
        "print(hashlib.sha256('\\0'.join(texts).encode()).hexdigest())\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].strip()) == 64


def test_another_seed_gives_another_corpus() -> None:
    """Seeds matter: two of them share next to nothing."""
    one = {document.text for document in corpus.sample("train", 1, 300)}
    other = {document.text for document in corpus.sample("train", 2, 300)}
    assert len(one & other) < 30


def test_no_document_is_in_both_splits() -> None:
    """Among hundreds of documents of each split none is the same text."""
    train = {document.text for document in corpus.sample("train", 1, 1000)}
    held_out = {document.text for document in corpus.sample("held_out", 1, 500)}
    assert not train & held_out


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_item_with_a_key_lies_on_the_side_of_its_document(split: Split) -> None:
    """No story, sum, count, introduction or list of words of one split is an item of the other."""
    documents = corpus.sample(split, 3, 500)
    keys = [document.story.key for document in documents if isinstance(document, StoryDocument)]
    keys += [turn.key for turn in _turns(documents) if turn.key]
    assert len(keys) > 500
    assert {split_of(key) for key in keys} == {split}


def test_answers_of_sums_are_right() -> None:
    """Every sum, difference and product in the corpus is what arithmetic says."""
    answers = [turn.answer for turn in _turns(corpus.sample("train", 4, 500)) if turn.task == "arithmetic"]
    assert len(answers) > 100
    for answer in answers:
        left, right = answer.removesuffix(".").split(" = ")
        assert eval(left, {"__builtins__": {}}) == int(right), answer


def test_a_story_holds_the_answer_to_each_of_its_questions() -> None:
    """A fact that is asked for stands in the story, word for word."""
    stories = [
        document.story for document in corpus.sample("train", 5, 300) if isinstance(document, StoryDocument)
    ]
    assert len(stories) > 35
    for story in stories:
        for question in story.questions:
            assert question.fact in story.text, (question, story.text)
            assert question.fact in question.answer


def test_every_task_occurs_in_both_splits() -> None:
    """What is taught can be measured: each task has held-out turns."""
    tasks = [{turn.task for turn in _turns(corpus.sample(split, 6, 700))} for split in ("train", "held_out")]
    assert tasks[0] == tasks[1]
    assert {"arithmetic", "counting", "repeating", "question", "story", "introduction", "recall"} <= tasks[0]

"""Drafts from a prediction: found again after an edit however long it is, in a time that its length does not change."""

from __future__ import annotations

import random
import time

from zmqengine.engine.speculation.predictions import PredictionPosition

LONGEST = 131_072
SHORT = 16_384


def prediction(tokens: int) -> list[int]:
    draw = random.Random(3)
    return [draw.randrange(150_000) for _ in range(tokens)]


def best_s(predicted: list[int]) -> float:
    """The least processor time of a first draft, of several."""
    spent_s = []
    for _ in range(9):
        begun_s = time.thread_time()
        PredictionPosition(predicted, 0).draft([1, 2, 3, 4], 4)
        spent_s.append(time.thread_time() - begun_s)
    return min(spent_s)


def test_a_prediction_as_long_as_a_context_takes_no_longer_to_index_than_a_short_one() -> None:
    """131,072 tokens took 232 ms between two steps of all streams; they are indexed a part at a time."""
    assert best_s(prediction(LONGEST)) < 2.5 * best_s(prediction(SHORT))


def test_an_output_is_found_again_after_each_edit_of_a_long_prediction() -> None:
    """Every 500 tokens some were left out, put in or replaced: three tokens later the draft is right again."""
    predicted = prediction(LONGEST)
    output: list[int] = []
    right_from: list[int] = []
    for number, begin in enumerate(range(0, LONGEST, 500)):
        output += [[], [7, 8], [9]][number % 3]
        right_from.append(len(output) + 3)
        output += predicted[begin + 5 : begin + 500]
    position = PredictionPosition(predicted, 0)
    for place in right_from:
        # A few tokens a step, as steps make them.
        for end in range(place - 3, place + 1):
            draft = position.draft(output[:end], 4)
        assert list(draft) == output[place : place + 4], place
        position.draft(output[: place + 450], 4)


def test_an_output_may_turn_back_to_an_earlier_place() -> None:
    """A repeated paragraph: where nothing follows the place that was left, the first occurrence counts."""
    predicted = prediction(1000)
    position = PredictionPosition(predicted, 0)
    output = [*predicted[:900], 7, *predicted[100:103]]
    for end in range(890, len(output) + 1):
        draft = position.draft(output[:end], 4)
    assert list(draft) == predicted[103:107]

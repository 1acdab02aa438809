"""A worker process on a small checkpoint that sees: the rules of images, and a crash while it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.images import Picture, prompt_of
from tests.support.workers import START_S, WorkerProcess, wait_until
from tests.vision.checkpoints import case, write
from zmqengine.conformance import check
from zmqengine_client.images.image_body import ImageBody
from zmqengine_client.images.prompt_image import PromptImage

COUNT = 300


def test_a_grid_that_its_tower_has_no_positions_for_does_not_reach_the_engine(tmp_path: Path) -> None:
    """InternVL has a table of positions for a tile: five images of another size ended the worker, for all its users."""
    directory = write(tmp_path, case("internvl"))
    with WorkerProcess(None, model=str(directory), warm_up_s=0.0) as worker:
        worker.wait_ready()
        outcomes = list(check(worker.address, answer_s=START_S, only="G image"))
        assert {outcome.rule.says: outcome.problem for outcome in outcomes if outcome.problem} == {}
        with worker.client() as client:
            assert "\nzmqengine_engine_failures 0" in client.metrics()


@pytest.mark.process
def test_a_real_worker_keeps_the_rules_of_images_and_sees_after_a_crash(tmp_path: Path) -> None:
    """The next worker has no pixels and wants them: the stream goes on at its next token."""
    directory = write(tmp_path, case("smolvlm"))
    with WorkerProcess(None, model=str(directory), warm_up_s=0.0) as worker, worker.client() as client:
        worker.wait_ready()
        outcomes = list(check(worker.address, answer_s=START_S, only="G image"))
        assert {outcome.rule.says: outcome.problem for outcome in outcomes if outcome.problem} == {}
        card = client.tokenizer().vision
        assert card is not None
        picture = Picture(card, ((8, 8),))
        prompt, ((_, at),) = prompt_of([1, 2, 3], picture, [4, 5])

        def image() -> PromptImage:
            return PromptImage(picture.ref(at), lambda: ImageBody.of(picture.pixels))

        options: dict[str, Any] = {"max_tokens": COUNT, "ignore_eos": True}
        whole = client.generate_tokens(prompt, images=[image()], **options).read().tokens
        while True:
            epoch = client.describe().epoch
            stream = client.generate_tokens(prompt, images=[image()], **options)
            next(stream)
            worker.kill_engine()
            again = stream.read()
            assert again.tokens == whole
            if again.resumed:
                break
            # On a busy machine an answer may be over before the crash: then another.
            wait_until(lambda: client.describe().epoch != epoch, "the worker did not come back")  # noqa: B023
            client.wait_ready()
        turn = [*prompt, *whole[:40], 6, 7]
        after = client.generate_tokens(turn, images=[image()], max_tokens=4).read()
        assert after.cached_tokens >= len(prompt)
        other = Picture(card, ((8, 8),), change=9)
        changed = PromptImage(other.ref(at), lambda: ImageBody.of(other.pixels))
        assert client.generate_tokens(turn, images=[changed], max_tokens=4).read().cached_tokens <= at + 1

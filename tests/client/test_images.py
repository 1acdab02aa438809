"""Both clients send images to a worker that sees, in every form that a program has them in."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image

from tests.support.thread_work import ThreadWork
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.errors import BadRequest
from zmqengine.testing import FakeWorker
from zmqengine_client import AsyncClient

Connect = Callable[..., Any]


@pytest.fixture(scope="module")
def seeing() -> Iterator[FakeWorker]:
    """A worker whose output depends on the hashes of its images."""
    with FakeWorker(FakeEngineConfig(vision=True), process=True) as worker:
        yield worker


def picture(colour: tuple[int, int, int] = (200, 30, 30), odd: bool = False) -> Image.Image:
    """A picture; an odd one differs in one pixel."""
    image = Image.new("RGB", (32, 24), colour)
    if odd:
        image.putpixel((5, 7), (1, 2, 3))
    return image


def file_of(image: Image.Image) -> bytes:
    """The picture as a file."""
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def message(*images: Any) -> dict[str, Any]:
    """A question about images."""
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "what is it"}]}


async def answer(client: Any, *messages: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    found: list[int] = (await client.chat(list(messages), max_tokens=12, seed=1).read()).tokens
    return found


def test_every_form_of_an_image_is_the_same_image(connect: Connect, seeing: FakeWorker, tmp_path) -> None:
    """A path, bytes, a data URL, a PIL image, OpenAI's part; one other pixel is another image."""
    data = file_of(picture())
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    openai = {"type": "image_url", "image_url": {"url": url}}

    async def scenario() -> None:
        async with connect(seeing.address) as client:
            answers = [
                await answer(client, message(form)) for form in (path, str(path), data, url, picture())
            ]
            parts = [openai, {"type": "text", "text": "what is it"}]
            answers.append(await answer(client, {"role": "user", "content": parts}))
            assert len({tuple(each) for each in answers}) == 1
            other = await answer(client, message(picture(odd=True)))
            assert other != answers[0]

    asyncio.run(scenario())


def test_places_and_order_of_images_are_those_of_the_messages(connect: Connect, seeing: FakeWorker) -> None:
    """Two images swapped are another prompt; a marker in a user's text is text."""
    first, second = picture(), picture((1, 2, 200))

    async def scenario() -> None:
        async with connect(seeing.address) as client:
            marker = (await client.tokenizer()).image_marker
            one = await answer(
                client, message(first), {"role": "assistant", "content": "ok"}, message(second)
            )
            two = await answer(
                client, message(second), {"role": "assistant", "content": "ok"}, message(first)
            )
            assert one != two
            text = {"role": "user", "content": f"this {marker} is text"}
            assert await answer(client, text, {"role": "assistant", "content": "ok"}, message(first))

    asyncio.run(scenario())


def test_generate_puts_images_before_the_prompt_or_at_its_markers(
    connect: Connect, seeing: FakeWorker
) -> None:
    """Without a marker as with one before the text."""

    async def scenario() -> None:
        async with connect(seeing.address) as client:
            marker = (await client.tokenizer()).image_marker
            texts = ("it is", f"{marker}it is", f"it {marker} is")
            made = [
                (await client.generate(text, images=[picture()], max_tokens=9, seed=1).read())
                for text in texts
            ]
            assert made[0].tokens == made[1].tokens != made[2].tokens

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"<svg/>", "image 0: the image is none of PNG"),
        ("/none.png", "cannot be read"),
        ("https://a.b/c", "URL"),
        (None, "has its image as"),
    ],
)
def test_what_is_no_image_ends_the_stream_with_a_reason(
    connect: Connect, seeing: FakeWorker, image: Any, reason: str
) -> None:
    """As every other refusal: when the stream is read."""

    async def scenario() -> None:
        async with connect(seeing.address) as client:
            stream = client.chat([message(image)], max_tokens=3)
            with pytest.raises(BadRequest, match=reason):
                await stream.read()

    asyncio.run(scenario())


def test_a_model_that_sees_nothing_says_so(connect: Connect, worker: FakeWorker) -> None:
    """Before an image is decoded."""

    async def scenario() -> None:
        async with connect(worker.address) as client:
            with pytest.raises(BadRequest, match="sees no images"):
                await client.chat([message(b"junk")], max_tokens=3).read()
            with pytest.raises(BadRequest, match="sees no images"):
                await client.generate("x", images=[b"junk"], max_tokens=3).read()

    asyncio.run(scenario())


@pytest.mark.process
def test_streams_with_images_survive_a_crash(connect: Connect) -> None:
    """The next worker knows no image: they are sent again, and each stream goes on at its next token."""
    with FakeWorker(FakeEngineConfig(vision=True, step_ms=10.0), process=True) as worker:

        async def scenario() -> None:
            async with connect(worker.address) as client:
                images = [picture((number, 9, 9)) for number in range(3)]
                whole = [
                    (await client.chat([message(image)], max_tokens=60, seed=1).read()).tokens
                    for image in images
                ]
                resumed = [0]
                # On a busy machine one may be over before the kill.
                while resumed != [1, 1, 1]:
                    streams = [client.chat([message(image)], max_tokens=60, seed=1) for image in images]
                    for stream in streams:
                        await stream.__anext__()
                    await asyncio.to_thread(worker.kill)
                    await asyncio.to_thread(worker.start)
                    again = [await stream.read() for stream in streams]
                    assert [each.tokens for each in again] == whole
                    resumed = [each.resumed for each in again]

        asyncio.run(scenario())


def test_the_event_loop_does_nothing_of_an_image_but_send_it(seeing: FakeWorker) -> None:
    """Files are read, decoded, cut, hashed and put into frames by threads; also when the worker wants one again."""
    large = [file_of(Image.effect_noise((640, 480), 40 + number).convert("RGB")) for number in range(3)]
    work = ThreadWork()

    async def scenario() -> None:
        async with AsyncClient(seeing.address) as client:
            await client.tokenizer()
            sys.setprofile(work)
            await asyncio.gather(*[answer(client, message(image)) for image in large])
            # Their hashes are known in this process, and not to the worker in another scope.
            await client.chat([message(large[0])], max_tokens=3, cache_scope="session").read()
            sys.setprofile(None)

    asyncio.run(scenario())
    assert work.calls > 100
    assert not work.found

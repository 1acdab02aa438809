"""The pictures of the pages in the docs, made anew: python -m tests.http.page.page_pictures docs/pictures

A scripted model writes the answer with code; the bundled vision model describes a picture.
"""

from __future__ import annotations

import base64
from pathlib import Path

import click

from tests.http.front import Front, send, serving
from tests.http.page.browsers import KEYS, Browser, opened, until
from tests.http.scripted import ScriptedClient
from tests.support.workers import WorkerProcess
from zmqengine_http import HttpConfig

QUESTION = "Write a function that lists the primes up to a limit, in Python."
ANSWER = """<think>A sieve is the usual way; a bytearray keeps it small and fast.</think>
A sieve keeps one flag per number and crosses out multiples, in $O(n \\log \\log n)$ steps:

```python
def primes(limit):
    flags = bytearray([1]) * (limit + 1)
    flags[:2] = b"\\0\\0"
    for n in range(2, int(limit**0.5) + 1):
        if flags[n]:
            flags[n * n :: n] = bytes(len(flags[n * n :: n]))
    return [n for n, flag in enumerate(flags) if flag]
```

| limit | primes |
|---|---|
| 10 | 4 |
| 100 | 25 |

1. It is **exact**, with one byte per number.
2. For more than some 10^8, use a segmented sieve.
"""
DROP = """
    const bytes = Uint8Array.from(atob(arguments[0]), (each) => each.charCodeAt(0));
    const data = new DataTransfer(); data.items.add(new File([bytes], 'shapes.png', { type: 'image/png' }));
    const event = new Event('drop', { bubbles: true, cancelable: true });
    Object.defineProperty(event, 'dataTransfer', { value: data });
    document.getElementById('text').dispatchEvent(event);
"""
READY = "const d = document.body.dataset; return d.ready === '1' && (d.loaded || !document.getElementById('talk'))"
ANSWERED = (
    "return document.querySelectorAll('.turn.assistant').length === 1 "
    "&& document.getElementById('stop').hidden"
)
RATED = "return /\\d/.test((document.querySelectorAll('#requests td')[5] || {textContent: ''}).textContent)"


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True))
def main(directory: Path) -> None:
    """Make the pictures in DIRECTORY."""
    facts: dict[str, str | bool | int] = {"think_start": "<think>", "think_end": "</think>"}
    client = ScriptedClient(
        lambda prompt: ANSWER, name="scripted-model", facts=facts, chunk_tokens=4, step_s=0.04
    )
    with opened("chromium") as browser:
        with serving(HttpConfig(), lambda *_: client) as front:  # type: ignore[arg-type, return-value]
            browser.size(1280, 800)
            _talk(browser, front, QUESTION)
            _keep(browser, directory / "page-chat.png")
            browser.scheme("dark")
            browser.size(390, 844)
            _keep(browser, directory / "page-chat-narrow-dark.png")
        browser.scheme("light")
        browser.size(1200, 700)
        with WorkerProcess(None, model="pico-eye") as worker:
            with worker.client() as native:
                native.wait_ready()
            with serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front:
                browser.get(front.url + "/")
                until(browser, READY, "the page sees the worker")
                image = (directory / "shapes.png").read_bytes()
                browser.js(DROP, base64.b64encode(image).decode())
                until(
                    browser, "return document.querySelectorAll('#attached img').length === 1", "a thumbnail"
                )
                _talk(browser, front, "What do you see?", opens=False)
                _keep(browser, directory / "page-image.png")
                running = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
                with send(front, running, "/v1/completions"):
                    browser.get(front.url + "/workers")
                    until(
                        browser,
                        "return document.querySelectorAll('#requests tr').length === 1",
                        "the request",
                    )
                    until(browser, RATED, "its speed")
                    _keep(browser, directory / "page-workers.png")


def _talk(browser: Browser, front: Front, text: str, *, opens: bool = True) -> None:
    """Ask and wait for the end of the answer."""
    if opens:
        browser.get(front.url + "/")
        until(browser, READY, "the page sees the worker")
    browser.keys("#text", text + KEYS["Enter"])
    until(browser, ANSWERED, "the answer's end")


def _keep(browser: Browser, path: Path) -> None:
    path.write_bytes(browser.picture())


if __name__ == "__main__":
    main()

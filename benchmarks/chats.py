"""`python -m benchmarks.chats MODEL`: unlike chats in the engine alone, in tokens a second of processor time.

The work is that of `zmqengine bench serve --scenario chat` without pauses, and the same for every version of the
engine: each user sends a fixed number of requests, and no answer ends early. Compare versions in turns, since a loaded
machine has slower caches.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator

import click

from zmqengine.bench.options import ScenarioOptions
from zmqengine.engine.interface import Engine, RowRequest
from zmqengine.engine.options import EngineOptions
from zmqengine.sampling_params import Sampling

WORK = ScenarioOptions()


@click.command()
@click.argument("model")
@click.option("--users", multiple=True, type=int, default=(1, 4, 8, 16), show_default=True)
@click.option("--requests", default=4, show_default=True, help="Requests of each user.")
def main(model: str, users: tuple[int, ...], requests: int) -> None:
    """Print a line for each number of users."""
    # MLX is imported with it, and the engine sets its environment first.
    from zmqengine.engine.open import open_mlx_engine
    from zmqengine.pico import BUNDLED, model_path

    directory = str(model_path(model)) if model in BUNDLED else model
    for count in users:
        engine = open_mlx_engine(directory, EngineOptions(warm_up_s=0, speculate="off")).engine
        tokens, steps, seconds = talk(engine, count, requests)
        engine.close()
        print(f"{count} users: {tokens / seconds:.0f} tokens/s, {1000 * seconds / steps:.2f} ms a step")


def talk(engine: Engine, users: int, requests: int) -> tuple[int, int, float]:
    """Tokens, steps and seconds of processor time until every user has all answers."""
    asking = {user: conversation(user, requests, engine.info.vocab_size) for user in range(users)}
    thinking, owners = list(range(users)), dict[int, int]()
    tokens = steps = 0
    begin_s = time.process_time()
    while thinking or owners:
        for user in thinking:
            if (request := next(asking[user], None)) is not None:
                owners[request.row] = user
                if failures := engine.insert([request]):
                    raise click.ClickException(failures[0].message)
        result = engine.next()
        tokens, steps = tokens + len(result.tokens), steps + 1
        thinking = [owners.pop(token.row) for token in result.tokens if token.finish is not None]
    return tokens, steps, time.process_time() - begin_s


def conversation(user: int, count: int, vocab_size: int) -> Iterator[RowRequest]:
    """The requests of one user."""
    chance = random.Random(f"user {user}")
    shared = random.Random("shared").choices(range(10, vocab_size), k=WORK.chat_shared_tokens)
    middle = math.log(WORK.chat_prompt_tokens_median)
    for number in range(count):
        length = round(chance.lognormvariate(middle, WORK.chat_prompt_tokens_sigma))
        prompt = chance.choices(range(10, vocab_size), k=max(1, min(length, WORK.chat_prompt_tokens_max)))
        yield RowRequest(
            user * count + number,
            [*shared, *prompt],
            chance.randint(*WORK.chat_answer_tokens),
            sampling=Sampling(temperature=chance.choice(WORK.chat_temperatures), top_p=WORK.chat_top_p),
            seed=chance.randrange(1 << 30),
            stop_token_ids=frozenset(),
        )


if __name__ == "__main__":
    main()

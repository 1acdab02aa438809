"""The pool of workers, and the routing of requests: by model, then by cached prefix, then by load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from zmqengine_http.serving.errors import ApiError, bad_field, no_worker
from zmqengine_http.workers.worker import ADAPTER_MARK, Model, PooledWorker

PREFIX_TOKENS = 64
PREFIXES_MAX = 4096
BLOCKS_MAX = 64
SLACK = 4
"""Extra running requests over the least loaded worker up to which the worker with the prefix is chosen."""


LATEST = ":latest"
"""The tag that Ollama's clients add to every name."""
LOADED_MODEL = "default_model"
"""The name that clients of mlx_lm.server use for the one model that is loaded."""


class Pool:
    """The workers, found by the names of their models."""

    def __init__(self, workers: Sequence[PooledWorker], aliases: Mapping[str, str]) -> None:
        self.workers = list(workers)
        self._aliases = dict(aliases)
        self._learned: dict[str, str] = {}
        self._homes: OrderedDict[object, PooledWorker] = OrderedDict()

    def learn(self, names: Mapping[str, str]) -> None:
        """Further names of models, in place of the earlier ones."""
        self._learned = {alias: name for alias, name in names.items() if alias != name}

    def named(self, name: str) -> str:
        """The model that an alias of this front-end's own stands for; any other name unchanged."""
        return self._aliases.get(name) or self._pattern(name) or name

    @property
    def ready(self) -> bool:
        """Whether any worker takes requests."""
        return any(worker.ready for worker in self.workers)

    def models(self) -> dict[str, Model]:
        """The models of workers that are or were ready, by name and alias.

        Of several workers with one name it is the longest context, those that are ready first: `choose` knows who has
        it.
        """
        ready_models = [(worker.ready, worker.model) for worker in self.workers if worker.model]
        ready_models.sort(key=lambda each: (each[0], each[1].context_tokens))
        known = {model.card.name: model for _, model in ready_models}
        aliases = {
            alias: known[name]
            for alias, name in (self._learned | self._aliases).items()
            if name in known and "*" not in alias
        }
        named = known | aliases
        return named | {
            f"{name}{ADAPTER_MARK}{adapter}": model.adapted(adapter)
            for name, model in named.items()
            for adapter in model.card.adapters
        }

    def model(self, name: str | None) -> Model:
        """The model of this name, or the only one if `name` is None.

        Raises a 404, or a 503 while a worker that may serve it is not up yet.
        """
        known = self.models()
        if name is None:
            names = sorted({model.card.name for model in known.values()})
            if not names:
                raise no_worker()
            if len(names) > 1:
                raise bad_field("model", f"one of {', '.join(names)} must be given")
            return known[names[0]]
        if name in known:
            return known[name]
        alias = self._pattern(name)
        if alias is not None and alias in known:
            return known[alias]
        if name.removesuffix(LATEST) in known:
            return known[name.removesuffix(LATEST)]
        if name == LOADED_MODEL and len({model.card.name for model in known.values()}) == 1:
            return next(iter(known.values()))
        if any(worker.model is None for worker in self.workers):
            # A worker that is not up yet may serve it.
            raise no_worker(name[:200])
        raise ApiError(404, f"The model {name[:200]!r} does not exist", param="model", code="model_not_found")

    def _pattern(self, name: str) -> str | None:
        """The model of the longest wildcard alias that matches the name, or None."""
        fitting = [alias for alias in self._aliases if "*" in alias and fnmatchcase(name, alias)]
        return self._aliases[max(fitting, key=len)] if fitting else None

    def choose(self, model: Model, prompt: Sequence[int], key: str | None, output: int = 0) -> PooledWorker:
        """The worker for a prompt: the one with its cache key or longest prefix, unless `SLACK` busier.

        Only workers are asked whose context takes the prompt and `output` tokens. Raises a 503 if none of the model's
        is ready.
        """
        tokens = len(prompt) + output
        candidates = [
            worker
            for worker in self.workers
            if worker.serves(model) and worker.model and tokens <= worker.model.context_tokens
        ]
        if not candidates:
            raise no_worker(model.card.name)
        chosen = min(candidates, key=lambda worker: worker.running)
        if len(candidates) == 1:
            return chosen
        marks = self._marks(model, prompt, key)
        for mark in reversed(marks):
            home = self._homes.get(mark)
            if home in candidates and home.running <= chosen.running + SLACK:
                chosen = home
                break
        self._remember(marks, chosen)
        return chosen

    def _marks(self, model: Model, prompt: Sequence[int], key: str | None) -> list[object]:
        """A chained hash per block of the prompt, and last, with the highest precedence, that of the cache key."""
        name = model.name
        mark, marks = hash(name), list[object]()
        for start in range(
            0, min(len(prompt), BLOCKS_MAX * PREFIX_TOKENS) - PREFIX_TOKENS + 1, PREFIX_TOKENS
        ):
            mark = hash((mark, *prompt[start : start + PREFIX_TOKENS]))
            marks.append(mark)
        # A hash of the key, as of the blocks: clients send keys of any length.
        return [*marks, hash((name, key))] if key else marks

    def _remember(self, marks: Sequence[object], worker: PooledWorker) -> None:
        for mark in marks:
            self._homes[mark] = worker
            self._homes.move_to_end(mark)
        while len(self._homes) > PREFIXES_MAX:
            self._homes.popitem(last=False)

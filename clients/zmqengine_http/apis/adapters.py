"""Loading and unloading of LoRA adapters, by vLLM's paths and fields.

Source: vLLM's OpenAI-compatible server (/v1/load_lora_adapter, /v1/unload_lora_adapter).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from zmqengine.protocol.messages import NewAdapterName
from zmqengine_client import AsyncClient
from zmqengine_client.errors import Conflict, ModelLoadError
from zmqengine_http.endpoint import Service, post
from zmqengine_http.serving.body import Body, ignored, refused
from zmqengine_http.serving.errors import ApiError, bad_field, no_worker
from zmqengine_http.serving.exchange import Exchange
from zmqengine_http.workers.worker import ADAPTER_MARK, Model, PooledWorker


class AdapterLoad(Struct, frozen=True, kw_only=True):
    """The body of a load. `model`: the one that gets the adapter, where there are several."""

    lora_name: NewAdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    model: str | None = None


class AdapterUnload(Struct, frozen=True, kw_only=True):
    """The body of an unload."""

    lora_name: NewAdapterName
    model: str | None = None


async def load(service: Service, exchange: Exchange, request: AdapterLoad) -> None:
    """POST /v1/load_lora_adapter: the response comes when requests may have the adapter."""
    exchange.check_operates()
    directory = str(_allowed(service, exchange, request.lora_path))
    async with _model(service, request.model) as model:
        await _each(service, model, lambda client: client.load_adapter(request.lora_name, directory))
    await exchange.send_json({"success": True, "id": f"{model.card.name}{ADAPTER_MARK}{request.lora_name}"})


async def unload(service: Service, exchange: Exchange, request: AdapterUnload) -> None:
    """POST /v1/unload_lora_adapter: refuse new requests with the adapter; those that run end as they would."""
    exchange.check_operates()
    async with _model(service, request.model) as model:
        if not any(request.lora_name in worker.adapters for worker in _workers(service, model)):
            raise ApiError(
                404,
                f"The model {model.card.name} has no adapter {request.lora_name!r}",
                param="lora_name",
                code="model_not_found",
            )
        await _each(service, model, lambda client: client.unload_adapter(request.lora_name))
    await exchange.send_json({"success": True, "id": f"{model.card.name}{ADAPTER_MARK}{request.lora_name}"})


def _allowed(service: Service, exchange: Exchange, path: str) -> Path:
    """The directory of an adapter. Raises a 403 for one that is not below `--adapter-dir`, unless the key is an
    operator's: any file there would be read."""
    root = service.config.adapter_dir
    if root is None and not exchange.operates:
        raise ApiError(
            403,
            "lora_path: no directory of adapters is allowed here: start the front-end with --adapter-dir DIR, or with "
            "an --operator-key and send that key",
            param="lora_path",
            code="not_authorized",
        )
    if root is None and not Path(path).is_absolute():
        raise bad_field("lora_path", "must be absolute, as there is no --adapter-dir")
    try:
        base = Path(root or "/").expanduser().resolve()
        directory = (base / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise bad_field("lora_path", str(error)) from None
    if not exchange.operates and (directory == base or not directory.is_relative_to(base)):
        raise ApiError(
            403,
            "lora_path: it is not below --adapter-dir",
            param="lora_path",
            code="not_authorized",
        )
    return directory


@contextlib.asynccontextmanager
async def _model(service: Service, wanted: str | None) -> AsyncIterator[Model]:
    """The model of a name, or the only one, loaded and held where a launcher has it."""
    if service.launched is None:
        yield service.pool.model(wanted)
        return
    async with service.launched.held(wanted) as worker:
        assert worker.model is not None, "it is ready"
        yield worker.model


async def _each(service: Service, model: Model, change: Callable[[AsyncClient], Awaitable[None]]) -> None:
    """Change every worker of a model, and learn what it has then. Raises the first refusal; a worker that is asked
    again for what it has done passes it over."""
    workers = _workers(service, model)
    if not workers:
        raise no_worker(model.card.name)
    results = await asyncio.gather(*(change(worker.client) for worker in workers), return_exceptions=True)
    await asyncio.gather(*(worker.look() for worker in workers))
    for result in results:
        if isinstance(result, (ModelLoadError, Conflict)):
            raise ApiError(400, result.message, code=result.code)
        if isinstance(result, BaseException):
            raise result


def _workers(service: Service, model: Model) -> list[PooledWorker]:
    return [worker for worker in service.pool.workers if worker.serves(model)]


ENDPOINTS = (
    post(
        "/v1/load_lora_adapter",
        Body(
            AdapterLoad,
            fields=(
                refused("load_inplace", "unload the adapter first", False),
                ignored("is_3d_lora_weight", "the files tell"),
            ),
            unknown_ignored=True,
        ),
        load,
        "Load a LoRA adapter, which requests name behind their model",
        needs_model=False,
    ),
    post(
        "/v1/unload_lora_adapter",
        Body(
            AdapterUnload, fields=(ignored("lora_int_id", "adapters have names alone"),), unknown_ignored=True
        ),
        unload,
        "Unload a LoRA adapter; requests that have it end as they would",
        needs_model=False,
    ),
)

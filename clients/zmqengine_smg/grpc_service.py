"""The gateway's MLX engine service, implemented by one worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import grpc.aio
from smg_grpc_proto.generated import common_pb2, mlx_engine_pb2_grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from zmqengine_client import AsyncTokenStream, TokenLogprob
from zmqengine_client.errors import NotReady, ZmqEngineError
from zmqengine_smg.grpc_requests import read_request
from zmqengine_smg.grpc_responses import chunk_message, last_message, status_of, trailers_of, whole_message
from zmqengine_smg.tokenizer_files import chunks, tokenizer_zip
from zmqengine_smg.upstream import Upstream, UpstreamModel

log = logging.getLogger("zmqengine.smg")

MODEL_WAIT_S = 5.0

GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class MlxEngineService(mlx_engine_pb2_grpc.MlxEngineServicer):
    """Generate, Abort, health, model information, load and tokenizer.

    A caller that disconnects, or whose deadline passes, aborts its request. While the worker restarts, calls
    wait and resume at the next token. With `draining` set, the service reports itself unhealthy so that no
    requests come.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.draining = False
        self._upstream = upstream
        self._running: dict[str, AsyncTokenStream] = {}
        self._started_s = time.monotonic()

    @property
    def healthy(self) -> bool:
        """Whether a new request would be taken now."""
        return self._upstream.ready and not self.draining

    async def Generate(  # noqa: N802 - the service's own name
        self, request: pb.GenerateRequest, context: GenerateContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream the tokens of a request, or all in one message if `stream` is not set."""
        try:
            prompt, options = read_request(request, context.time_remaining())
            stops = list(options["stop_token_ids"])
            stream = self._upstream.client.generate_tokens(prompt, **options)
            async with stream:
                with self._registered(request.request_id, stream):
                    if request.stream:
                        async for chunk in stream:
                            progress = stream.progress
                            yield chunk_message(chunk, len(prompt), progress.cached if progress else 0)
                        yield last_message(stream.result, stops)
                    else:
                        logprobs: list[TokenLogprob] | None = None
                        async for chunk in stream:
                            if chunk.logprobs is not None:
                                logprobs = [*(logprobs or ()), *chunk.logprobs]
                        yield whole_message(stream.result, logprobs, stops)
        except ZmqEngineError as error:
            await self._refuse(context, error)

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        """Abort requests by id; their calls finish with `abort`. Unknown ids are requests that have ended."""
        for request_id in request.request_ids:
            stream = self._running.get(request_id)
            if stream is not None:
                stream.abort()
        return pb.AbortResponse()

    async def HealthCheck(  # noqa: N802
        self,
        request: pb.HealthCheckRequest,
        context: grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse],
    ) -> pb.HealthCheckResponse:
        """Whether the worker takes requests; a loading, draining or lost worker is unhealthy.

        Before the model is known the call waits, and then fails: a gateway that gets any answer registers the
        worker at once, and keeps it without a model.
        """
        await self._model(context)
        state = "draining" if self.draining else self._upstream.state
        return pb.HealthCheckResponse(healthy=self.healthy, message=f"the worker is {state}")

    async def GetModelInfo(  # noqa: N802
        self,
        request: pb.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.GetModelInfoResponse],
    ) -> pb.GetModelInfoResponse:
        """The model's name, limits and end tokens."""
        model = await self._model(context)
        card, limits, tokenizer = model.card, model.limits, model.tokenizer
        special = {name: tokenizer.token_id(text) for name, text in tokenizer.special_tokens.items()}
        return pb.GetModelInfoResponse(
            model_path=card.name,
            served_model_name=card.name,
            is_generation=True,
            max_context_length=limits.context_tokens_max,
            max_req_input_len=limits.prompt_tokens_max,
            vocab_size=card.vocab_size,
            eos_token_ids=card.eos_token_ids,
            bos_token_id=special.get("bos_token") or 0,
            pad_token_id=special.get("pad_token") or 0,
        )

    async def GetServerInfo(  # noqa: N802
        self,
        request: pb.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        """The load: requests of all clients that run or wait in the worker."""
        numbers = self._upstream.numbers
        return pb.GetServerInfoResponse(
            server_type="mlx",
            active_requests=int(numbers.get("running", 0) + numbers.get("queued", 0)),
            uptime_seconds=time.monotonic() - self._started_s,
        )

    async def GetTokenizer(  # noqa: N802
        self,
        request: common_pb2.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[common_pb2.GetTokenizerRequest, common_pb2.GetTokenizerChunk],
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files as a zip archive in chunks; the last chunk carries the archive's SHA-256."""
        archive = tokenizer_zip(await self._model(context))
        for data, sha256 in chunks(archive):
            yield common_pb2.GetTokenizerChunk(data=data, sha256=sha256)

    @contextlib.contextmanager
    def _registered(self, request_id: str, stream: AsyncTokenStream) -> Iterator[None]:
        """Let `Abort` find the request while it runs."""
        self._running[request_id] = stream
        try:
            yield
        finally:
            if self._running.get(request_id) is stream:
                del self._running[request_id]

    async def _model(self, context: grpc.aio.ServicerContext[Any, Any]) -> UpstreamModel:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(
                self._upstream.wait_for(lambda: self._upstream.model is not None), MODEL_WAIT_S
            )
        model = self._upstream.model
        if model is None:
            await self._refuse(
                context, NotReady(f"the worker is {self._upstream.state}: its model is not known yet")
            )
        return model

    async def _refuse(self, context: grpc.aio.ServicerContext[Any, Any], error: ZmqEngineError) -> NoReturn:
        await context.abort(status_of(error), error.message, trailers_of(error))
        raise AssertionError("unreachable: abort raises")

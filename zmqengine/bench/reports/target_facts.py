"""Facts of targets for a report: server, version, BLAS."""

from __future__ import annotations

import importlib.metadata

import msgspec

from zmqengine.bench.load.prompts import Vocabulary
from zmqengine.bench.reports.report import TargetFacts
from zmqengine.bench.targets.target import TargetError, TargetSpec
from zmqengine.errors import ZmqEngineError
from zmqengine_client import AsyncClient


async def target_facts(spec: TargetSpec) -> TargetFacts:
    """Facts of a target. Of foreign servers only the URL is known."""
    if not spec.worker:
        server = spec.address
        if spec.label.startswith("mlx_lm.server"):
            server = f"mlx_lm.server {importlib.metadata.version('mlx-lm')}, the same BLAS"
        return TargetFacts(label=spec.label, kind=spec.kind, server=server)
    client = AsyncClient(spec.worker, name="zmqengine bench")
    try:
        description, status = await client.describe(), await client.status()
    finally:
        await client.close()
    return TargetFacts(
        label=spec.label, kind=spec.kind, server=f"zmqengine {description.version}", facts=dict(status.facts)
    )


async def with_worker_pid(spec: TargetSpec) -> TargetSpec:
    """A worker target with its process id, if it runs on this machine."""
    if spec.kind != "worker" or spec.pids or "tcp://" in spec.address:
        return spec
    client = AsyncClient(spec.address, name="zmqengine bench")
    try:
        return msgspec.structs.replace(spec, pids=[(await client.describe()).pid])
    except ZmqEngineError as error:
        raise TargetError(f"{spec.label}: {error}") from error
    finally:
        await client.close()


async def vocabulary_of_worker(address: str) -> Vocabulary:
    """The vocabulary of a worker. Raises TargetError if it does not answer."""
    client = AsyncClient(address, name="zmqengine bench")
    try:
        tokenizer = await client.tokenizer()
        description = await client.describe()
    except ZmqEngineError as error:
        raise TargetError(f"{address}: {error}") from error
    finally:
        await client.close()
    if description.model is None:
        raise TargetError(f"{address}: no model is loaded")
    return Vocabulary(tokenizer.encode, tokenizer.decode, description.model.vocab_size)

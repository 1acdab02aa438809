"""The worker's tokenizer as the zip of files that the gateway reads."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator

import msgspec

from zmqengine_smg.upstream import UpstreamModel

CHUNK_BYTES = 64 * 1024


def tokenizer_files(model: UpstreamModel) -> dict[str, bytes]:
    """The files by name: `tokenizer.json`, its configuration with the chat template, and the end tokens.

    `generation_config.json` lists all end tokens, because the gateway ends an output at its `eos_token_id`.
    """
    tokenizer = model.tokenizer
    configuration: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.limits.context_tokens_max,
        "clean_up_tokenization_spaces": bool(tokenizer.facts.get("clean_up_tokenization_spaces", False)),
        **tokenizer.special_tokens,
    }
    if tokenizer.chat_template is not None:
        configuration["chat_template"] = tokenizer.chat_template
    ends = {"eos_token_id": sorted(model.card.eos_token_ids)}
    return {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": _json(configuration),
        "generation_config.json": _json(ends),
        "config.json": _json(
            {
                **ends,
                "vocab_size": model.card.vocab_size,
                "max_position_embeddings": model.card.context_tokens,
            }
        ),
    }


def tokenizer_zip(model: UpstreamModel) -> bytes:
    """The files as a zip archive, the same bytes every time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in tokenizer_files(model).items():
            # With a bare name `writestr` would store the present time.
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def chunks(archive: bytes) -> Iterator[tuple[bytes, str]]:
    """The archive in chunks of `CHUNK_BYTES`; the last comes with the archive's SHA-256 in hexadecimal,
    others with ""."""
    digest = hashlib.sha256(archive).hexdigest()
    for start in range(0, len(archive), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        yield archive[start:end], digest if end >= len(archive) else ""


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)

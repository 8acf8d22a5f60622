"""The JSON that describes a request to its client, in SGLang's words."""

from __future__ import annotations

import time
from typing import Any

from .request import Alternatives, Request


def answer(request: Request, version: str, sent: tuple[int, int] | None = None, *, text: bool) -> dict[str, Any]:
    """The answer for `request` as it is now; `sent` = (tokens, characters) already streamed makes it a delta.

    Token counts in `meta_info` are cumulative in either case. `text` is false when there is no tokenizer.
    """
    first_token, first_character = sent or (0, 0)
    body: dict[str, Any] = {}
    if text:
        body["text"] = request.visible_text()[first_character:]
    body["output_ids"] = request.output[first_token:]
    body["meta_info"] = _meta(request, version, first_token)
    return body


def _meta(request: Request, version: str, first: int) -> dict[str, Any]:
    done = request.finish is not None
    meta: dict[str, Any] = {"id": request.rid, "finish_reason": request.finish}
    if not request.queued_abort:
        meta["prompt_tokens"] = len(request.prompt)
    meta["weight_version"] = request.spans[-1][0] if done and request.spans else version
    if not request.queued_abort:
        meta["num_retractions"] = request.retractions
        meta["cached_tokens"] = 0
        meta["cached_tokens_details"] = None
    if request.return_logprob:
        _add_logprobs(meta, request, first)
    meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = len(request.output)
    meta["dp_rank"] = None
    if done:
        meta["weight_versions"] = [{"version": name, "start": start, "end": end} for name, start, end in request.spans]
        meta["e2e_latency"] = (request.finished_at or time.monotonic()) - request.created
        meta["response_sent_to_client_ts"] = time.time()
    return meta


def _add_logprobs(meta: dict[str, Any], request: Request, first: int) -> None:
    scored = request.prompt[request.logprob_start :] if request.prompt_logprobs is not None else []
    prompt_values: list[float | None] = [None, *(request.prompt_logprobs or [])]
    meta["input_token_logprobs"] = [
        [value, token, _text(request, token)] for value, token in zip(prompt_values, scored, strict=False)
    ]
    meta["output_token_logprobs"] = [
        [value, token, _text(request, token)]
        for value, token in zip(request.logprobs[first:], request.output[first:], strict=True)
    ]
    meta["output_token_logprobs_length"] = len(request.output)
    if request.top_logprobs:
        prompt_top = [None, *(_top(request, entry) for entry in request.prompt_top)]
        meta["input_top_logprobs"] = prompt_top if request.prompt_logprobs is not None else []
        meta["output_top_logprobs"] = [_top(request, entry) for entry in request.top[first:]]


def _text(request: Request, token: int) -> str | None:
    return request.decode_one(token) if request.text_in_logprobs and request.decode_one else None


def _top(request: Request, entry: Alternatives) -> list[list[Any]]:
    return [[value, token, _text(request, token)] for value, token in entry]

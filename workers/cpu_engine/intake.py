"""From the JSON body of POST /generate to checked `Request` objects."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .options import BadRequest, ContractError
from .params import SamplingParams, parse_sampling_params
from .request import Request, TextStream

MAX_BATCH = 1024
# SGLang keeps the last tokens of the context for itself; the numbers were read off a running server.
_PROMPT_MARGIN = 6
_OUTPUT_MARGIN = 2


@dataclass(frozen=True)
class Limits:
    """What a request must fit into, in tokens, and the ids that end a generation."""

    vocab_size: int
    context_length: int
    max_total_tokens: int
    eos: frozenset[int]


@dataclass(frozen=True)
class Intake:
    """Builds requests for one engine; `tokenizer` is None when the engine serves token ids only."""

    limits: Limits
    tokenizer: Any | None
    in_flight: Callable[[str], bool]

    def build(self, body: object) -> tuple[list[Request], bool, bool]:
        """(requests, whether the answer is a list, whether it is a stream).

        Raises `ContractError` for a malformed request and `BadRequest` for one that can't be served.
        """
        if not isinstance(body, Mapping):
            raise ContractError("the body must be a JSON object")
        params, is_list_of_params = self._params(body)
        prompts, batched = self._prompts(body)
        if is_list_of_params and len(params) != len(prompts):
            raise BadRequest(f"{len(params)} sampling_params for {len(prompts)} prompts")
        chosen = params if is_list_of_params else params * len(prompts)
        copies = chosen[0].n
        if any(item.n != copies for item in chosen) or len(prompts) * copies > MAX_BATCH:
            raise BadRequest(f"a batch needs one common n and at most {MAX_BATCH} answers in all")
        rids = self._rids(body, len(prompts), batched, copies)
        requests = []
        for index, prompt in enumerate(prompts):
            for copy in range(copies):
                rid = rids[index * copies + copy]
                requests.append(self._one(body, prompt, chosen[index], rid, copy))
        return requests, batched or copies > 1, bool(body.get("stream"))

    def _params(self, body: Mapping[str, Any]) -> tuple[list[SamplingParams], bool]:
        raw = body.get("sampling_params")
        if isinstance(raw, list):
            if not raw:
                raise ContractError("sampling_params must not be an empty list")
            return [parse_sampling_params(item) for item in raw], True
        return [parse_sampling_params(raw)], False

    def _prompts(self, body: Mapping[str, Any]) -> tuple[list[list[int]], bool]:
        ids, text = body.get("input_ids"), body.get("text")
        if body.get("input_embeds") is not None:
            raise BadRequest("input_embeds is not supported by the embedded engine; send input_ids or text")
        if (ids is None) == (text is None):
            raise BadRequest("Either text or input_ids should be provided, and only one of them.")
        if text is not None:
            return self._tokenize(text)
        if not isinstance(ids, list) or not ids:
            raise BadRequest("input_ids cannot be empty.")
        batched = isinstance(ids[0], list)
        prompts = ids if batched else [ids]
        if len(prompts) > MAX_BATCH:
            raise BadRequest(f"a batch can hold at most {MAX_BATCH} prompts, got {len(prompts)}")
        return [self._checked_ids(item) for item in prompts], batched

    def _tokenize(self, text: object) -> tuple[list[list[int]], bool]:
        if self.tokenizer is None:
            raise BadRequest("This engine runs with --skip-tokenizer-init: send input_ids, not text.")
        texts = text if isinstance(text, list) else [text]
        if not texts or len(texts) > MAX_BATCH or not all(isinstance(item, str) for item in texts):
            raise BadRequest(f"text must be a string or a list of 1 to {MAX_BATCH} strings")
        encoded = [self.tokenizer(item)["input_ids"] for item in texts]
        return [self._checked_ids(list(item)) for item in encoded], isinstance(text, list)

    def _checked_ids(self, ids: object) -> list[int]:
        if not isinstance(ids, list) or not ids:
            raise BadRequest("input_ids cannot be empty.")
        size = self.limits.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise BadRequest(f"input_ids must be integers between 0 and {size - 1}, got {token!r}")
        return ids

    def _rids(self, body: Mapping[str, Any], prompts: int, batched: bool, copies: int) -> list[str]:
        given = body.get("rid")
        count = prompts * copies
        if copies > 1 or given is None:
            return [secrets.token_hex(16) for _ in range(count)]
        if isinstance(given, str):
            rids = [f"{given}_{index}" for index in range(prompts)] if batched else [given]
        elif batched and isinstance(given, list) and len(given) == prompts:
            rids = given
        else:
            raise BadRequest("rid must be a string, or for a batch a list with one string per prompt")
        if not all(isinstance(item, str) and 0 < len(item) <= 512 for item in rids):
            raise BadRequest("rid must be a string of 1 to 512 characters")
        for item in rids:
            if self.in_flight(item) or rids.count(item) > 1:
                raise BadRequest(f"Duplicate request ID detected: {item}")
        return rids

    def _one(self, body: Mapping[str, Any], prompt: list[int], params: SamplingParams, rid: str, copy: int) -> Request:
        if params.stop and self.tokenizer is None:
            raise BadRequest("stop strings need a tokenizer, and this engine runs with --skip-tokenizer-init.")
        seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed + copy
        # Ids outside the vocabulary can't be generated; leaving them in would index past the logits.
        inside = frozenset(item for item in params.stop_token_ids if 0 <= item < self.limits.vocab_size)
        params = dataclasses.replace(params, stop_token_ids=inside)
        start = _integer(body, "logprob_start_len", -1)
        if start < -1 or start > len(prompt):
            raise BadRequest(f"logprob_start_len must be between -1 and the prompt's {len(prompt)} tokens, got {start}")
        top = _integer(body, "top_logprobs_num", 0)
        if not 0 <= top <= 1024:
            raise BadRequest(f"top_logprobs_num must be between 0 and 1024, got {top}")
        if body.get("token_ids_logprob") is not None:
            raise BadRequest("token_ids_logprob is not supported by the embedded engine; use SGLang for it")
        request = Request(
            rid=rid,
            prompt=prompt,
            params=params,
            seed=seed,
            limit=self._limit(len(prompt), params),
            eos=self.limits.eos,
            stream=bool(body.get("stream")),
            return_logprob=bool(body.get("return_logprob")),
            logprob_start=start,
            top_logprobs=top,
            text_in_logprobs=bool(body.get("return_text_in_logprobs")),
        )
        if self.tokenizer is not None:
            decode = partial(_decode, self.tokenizer, params.skip_special_tokens)
            request.text_stream = TextStream(decode)
            request.decode_one = lambda token: _decode(self.tokenizer, False, [token])
        return request

    def _limit(self, prompt: int, params: SamplingParams) -> int:
        context = self.limits.context_length
        if prompt >= context - _PROMPT_MARGIN:
            raise BadRequest(
                f"Input length ({prompt} tokens) exceeds the maximum allowed length "
                f"({context - _PROMPT_MARGIN} tokens)."
            )
        if params.max_new_tokens is not None and prompt + params.max_new_tokens > context:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {context} tokens: "
                f"{prompt} tokens of input and {params.max_new_tokens} to generate."
            )
        room = self.limits.max_total_tokens - prompt - 1
        if room < 1:
            raise BadRequest(
                f"The input ({prompt} tokens) doesn't fit the key/value memory "
                f"of {self.limits.max_total_tokens} tokens."
            )
        room = min(room, context - _OUTPUT_MARGIN - prompt)
        return room if params.max_new_tokens is None else min(room, params.max_new_tokens)


def _decode(tokenizer: Any, skip_special: bool, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _integer(body: Mapping[str, Any], key: str, default: int) -> int:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{key} must be an integer, got {value!r}")
    return value

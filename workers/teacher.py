"""A teacher's log-probs: a stage that asks an engine what it thinks of a finished response, token by token.

The engine (SGLang, or the embedded one) is sent prompt and response and generates nothing; its input log-probs from the
last prompt token on are those of the response. They are taken at temperature 1. A log-prob that is null, NaN or of
another token is refused: it would be distilled. Images of the prompt go along, and ids outside the teacher's vocabulary
never do: one of them kills a whole SGLang server.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore.arrays import TEACHER, Prepared
from samplestore.media import Image
from samplestore.types import StageClaim
from samplestore.verbs import stages
from samplestore.words import amount
from samplestore.workers import engine_state
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError
from samplestore.workers.rewards import RewardPoolStopped
from samplestore.workers.scoring import Write
from samplestore.workers.trajectory import VOCAB_BOUND

log = logging.getLogger("samplestore.scoring")

TRIES, FIRST_WAIT_S, MAX_WAIT_S = 6, 0.25, 10.0


class TeacherStage:
    """Serves the stage "teacher" with engines at `urls`, by turns.

    prepare      run.prepare_array: checks an array, writes a large one into a file
    images       run.images: the images of a prompt, by digest
    concurrency  requests at once
    timeout_s    of one request
    """

    def __init__(
        self, urls: Sequence[str], prepare: Callable[[str, Any], Prepared],
        images: Callable[[Iterable[str]], Mapping[str, Image]], *, concurrency: int = 16, timeout_s: float = 600.0,
    ) -> None:  # fmt: skip
        self.urls, self.prepare, self.room, self.timeout_s = itertools.cycle(urls), prepare, concurrency, timeout_s
        self.images = images
        self.client = EngineClient(timeout_s)
        self._vocabularies: dict[str, int] = {}
        self._stopped = False

    async def __aenter__(self) -> TeacherStage:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stopped = True
        await self.client.__aexit__(*error)

    async def do(self, claim: StageClaim, write: Write) -> None:
        began = time.monotonic()
        try:
            url, probs, label = await self._ask(claim)
        except EngineError as error:
            if self._stopped:
                raise RewardPoolStopped(claim.sample_id) from error
            outcome = stages.VERIFIER_TIMEOUT if error.kind == "unreachable" else stages.VERIFIER_ERROR
            await write(stages.fail_stage, claim, str(error), outcome, time.monotonic() - began)
            return
        made = await asyncio.to_thread(self.prepare, TEACHER, probs)
        details = {"engine": url, "weight_version": label}
        await write(stages.complete_stage, claim, details, time.monotonic() - began, made)

    async def _ask(self, claim: StageClaim) -> tuple[str, npt.NDArray[np.float32], str | None]:
        """(engine, log-probs [response tokens], its weights' label), from the first engine that answers. Raises
        EngineError."""
        prompt, response = claim.prompt_ids.tolist(), claim.response_ids.tolist()
        ids = [*prompt, *response]
        body: dict[str, Any] = {
            "rid": secrets.token_hex(16),
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
        }
        if claim.images:
            found = await asyncio.to_thread(self.images, claim.images)
            body["image_data"] = [found[digest].data_url for digest in claim.images]
        for number in range(1, TRIES + 1):
            url = next(self.urls)
            try:
                self._refuse_unknown(url, ids, await self._vocabulary(url))
                reply = await self.client.post(f"{url}/generate", body, self.timeout_s)
                return url, read_logprobs(reply, response), _label(reply)
            except EngineError as error:
                if error.kind not in ("unreachable", "busy") or number == TRIES or self._stopped:
                    raise
                log.warning("sample=%d teacher %s: %s", claim.sample_id, url, error)
            await asyncio.sleep(min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (number - 1)))
        raise AssertionError("the last try returns or raises")

    async def _vocabulary(self, url: str) -> int:
        """Ids below this are the teacher's. Raises EngineError."""
        if url not in self._vocabularies:
            self._vocabularies[url] = (await engine_state.server(self.client, url)).vocab_size or VOCAB_BOUND
        return self._vocabularies[url]

    def _refuse_unknown(self, url: str, ids: Sequence[int], size: int) -> None:
        wrong = next((place for place, token in enumerate(ids) if not 0 <= token < size), None)
        if wrong is not None:
            raise EngineError(
                "refused",
                f"token {ids[wrong]} at position {wrong} is outside the vocabulary of the teacher {url} (0 to "
                f"{size - 1:,}). A teacher has the run's tokenizer: look at its model with: curl {url}/model_info",
            )


def read_logprobs(reply: Any, response: Sequence[int]) -> npt.NDArray[np.float32]:
    """float32 [n], the log-probs of a response of n tokens, from an engine's input log-probs. The first entry, of the
    last prompt token, says nothing. Raises EngineError("broken")."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    entries = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(entries, list) or len(entries) < len(response):
        n = len(entries) if isinstance(entries, list) else "no"
        raise EngineError("broken", f"{n} input_token_logprobs for a response of {amount(len(response), 'token')}")
    values = []
    for place, (entry, token) in enumerate(zip(entries[-len(response) :], response, strict=True)):
        if not isinstance(entry, list | tuple) or len(entry) < 2 or entry[1] != token:
            raise EngineError("broken", f"input log-prob {place} is {str(entry)[:100]}, expected one of token {token}")
        value = entry[0]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise EngineError("broken", f"input log-prob {place} is {str(value)[:100]}, not a finite number")
        values.append(value)
    return np.array(values, dtype=np.float32)


def _label(reply: Any) -> str | None:
    label = reply["meta_info"].get("weight_version")
    return label[:200] if isinstance(label, str) else None

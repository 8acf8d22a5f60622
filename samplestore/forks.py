"""What a batch delivers of a sample that was forked from another: the tokens that it shares, read by reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samplestore import responses
from samplestore.types import Ids


def delivered(
    row: Any, prompt_ids: Ids, runs: Mapping[int, responses.Runs], own_prompt: int
) -> tuple[Ids, responses.Runs]:
    """(prompt, response) of a fork. Shared tokens come from its parent and carry no loss here: they are trained on
    once, there. A prompt of its own, the first `own_prompt` tokens that it stores, becomes the prompt.

    row   parent_id, parent_upto (NULL: a prompt of its own) and id of the sample
    """
    mine = runs[row.id]
    if row.parent_upto is None:
        return responses.ids(responses.until(mine, own_prompt)), responses.since(mine, own_prompt)
    # Of a parent that failed only what is shared was read.
    shared = responses.until(runs[row.parent_id], row.parent_upto) if row.parent_upto else ()
    return prompt_ids, (*(run.untrained() for run in shared), *mine)

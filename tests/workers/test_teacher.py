"""What a teacher is sent: images with their tokens, and no token that would kill it."""

from __future__ import annotations

from typing import Any

import numpy as np

import samplestore
from samplestore.images import read_all
from samplestore.run import Run
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.teacher import TeacherStage
from tests.support import factory as f

PNG = b"\x89PNG\r\n\x1a\nrest"
URL = "http://127.0.0.1:9"


class Teacher(EngineClient):
    """Answers with log-probs of the last two tokens, and keeps what it was sent."""

    def __init__(self, vocab_size: int | None) -> None:
        super().__init__(5.0)
        self.vocab_size = vocab_size
        self.asked: list[Any] = []
        self.looked = 0

    async def get(self, url: str, timeout_s: float = 10.0) -> Any:
        self.looked += 1
        return {"vocab_size": self.vocab_size, "context_length": 100}

    async def post(self, url: str, body: dict[str, Any], timeout_s: float = 30.0) -> Any:
        self.asked.append(body)
        entries = [[None, 0], *([-1.0, token] for token in body["input_ids"][-2:])]
        return {"meta_info": {"input_token_logprobs": entries}}


async def taught(run: Run, teacher: Teacher) -> None:
    stage = TeacherStage([URL], run.prepare_array, run.images)
    stage.client = teacher

    async def write(verb: Any, *args: Any) -> Any:
        return run.transact(lambda tx: verb(tx, *args))

    async with stage:
        for claim in run.claim_stages(f.register(run), 10):
            await stage.do(claim, write)


def answered(store: samplestore.Store, ids: list[int], **prompt: Any) -> tuple[Run, int]:
    run = store.run("r", samples_per_prompt=1, groups_per_step=1, epochs=1, stages=("teacher",), max_attempts=1)
    run.add_prompts([{"prompt_ids": [5, 6, 7], **prompt}])
    run.admit()
    (claim,) = run.claim(f.register(run), 1)
    run.append(claim, ids, [-0.1] * len(ids), version=0, finish_reason="stop")
    run.finish(claim)
    return run, claim.sample_id


async def test_images_go_along(store: samplestore.Store) -> None:
    run, sample_id = answered(store, [8, 9], images=[PNG, PNG])
    teacher = Teacher(10)
    await taught(run, teacher)
    (image,) = read_all([PNG])
    assert [body["image_data"] for body in teacher.asked] == [[image.data_url] * 2]
    assert run.array(sample_id, "teacher_log_probs")[0].tolist() == np.float32([-1.0, -1.0]).tolist()
    f.sound(run)


async def test_a_token_outside_its_vocabulary_is_not_sent(store: samplestore.Store) -> None:
    run, sample_id = answered(store, [8, 10])
    teacher = Teacher(10)
    await taught(run, teacher)
    assert teacher.asked == []
    (row,) = f.rows(run, "SELECT status, outcome, error FROM stage")
    assert (row["status"], row["outcome"]) == ("failed", "verifier_error")
    assert "token 10 at position 4 is outside the vocabulary of the teacher http://127.0.0.1:9 (0 to 9)" in row["error"]
    assert f.sample(run, sample_id)["status"] == "failed"
    f.sound(run)


async def test_a_teacher_that_tells_no_vocabulary_is_asked(store: samplestore.Store) -> None:
    run, _ = answered(store, [8, 10])
    teacher = Teacher(None)
    await taught(run, teacher)
    assert len(teacher.asked) == 1 and "image_data" not in teacher.asked[0]
    assert f.states(run) == ["ready"]

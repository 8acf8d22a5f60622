"""A trainer's hooks read text with the tokenizer that lies in the folder of the published weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import samplestore
from samplestore.tokenizers import load_tokenizer
from tests.support import factory as f
from tests.support.demo_data import build_tokenizer


def test_the_newest_weights_have_the_tokenizer(sqlite_url: str, tmp_path: Path) -> None:
    folder = build_tokenizer(tmp_path / "model")
    with samplestore.open(sqlite_url) as store:
        run = f.make_run(store, prompts=1, samples_per_prompt=1, groups_per_step=1)
        run.publish_weights(path=str(folder), step=0)
        (claim,) = run.claim(f.register(run), 1)
        ids = load_tokenizer(folder / "tokenizer.json").encode("The answer is 42.")
        run.append(claim, ids, [-0.5] * ids.size, 1, "stop")
        run.finish(claim)
        seen: list[str] = []

        def look(args: Any, groups: list[list[Any]], source: Any) -> None:
            seen.extend(sample.response for group in groups for sample in group)

        with run.batch(1, all_samples=look, timeout=10):
            pass
        assert seen == ["The answer is 42."]

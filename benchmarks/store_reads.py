"""A trainer's read: 64 groups to packed arrays, against a plain read and numpy.frombuffer."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
from store_data import Spent, new_run, timed
from store_rollouts import GROUP, rollouts

import samplestore
from samplestore.batch import Batch
from samplestore.run import Run
from samplestore.urls import parse_url, sqlite_module

GROUPS = 64
QUERY = """SELECT s.id, p.prompt_ids, g.payload FROM batch_group b JOIN sample s ON s.group_id = b.group_id
    JOIN sample_group gr ON gr.id = s.group_id JOIN prompt p ON p.id = gr.prompt_id
    JOIN segment g ON g.sample_id = s.id AND g.incarnation = s.incarnation
    WHERE b.batch_id = {} ORDER BY b.position, s."index", g.seq"""


def fill(run: Run, groups: int) -> Batch:
    """Finish all samples, with lengths of the long profile, and lease them."""
    owner = run.register()
    answers = rollouts(groups * GROUP)
    while claims := run.claim(owner, 64):
        for claim in claims:
            for ids, probs in answers[claim.sample_id % len(answers)]:
                run.append(claim, ids, probs, 0)
            run.finish(claim)
    return run.batch(step=0, groups=groups, timeout=60)


def api(run: Run, batch: Batch) -> Spent:
    told: list[Spent] = []
    fresh = Batch(run, _Row(batch), batch._worker_id)
    gc.collect()
    with timed(fresh.n_samples, [], told):
        made = fresh.arrays()
    assert made["tokens"].size == fresh.n_tokens + GROUP * fresh.n_groups * 256
    return told[0]


class _Row:
    """What a batch keeps of its row, to read it again."""

    def __init__(self, batch: Batch) -> None:
        for name in ("id", "step", "timeline", "current_version", "policy", "n_groups", "n_samples", "n_tokens"):
            setattr(self, name, getattr(batch, name))
        self.state = "leased"


class SqliteReader:
    def __init__(self, url: str) -> None:
        self.db = sqlite_module().connect(parse_url(url).database)
        self.db.execute("PRAGMA cache_size=-65536")

    def rows(self, batch: int) -> Any:
        return self.db.execute(QUERY.format(batch)).fetchall()


class PostgresReader:
    def __init__(self, url: str) -> None:
        import psycopg

        self.db = psycopg.connect(parse_url(url).set(drivername="postgresql").render_as_string(hide_password=False))

    def rows(self, batch: int) -> Any:
        return self.db.cursor(binary=True).execute(QUERY.format(batch)).fetchall()


READERS = {"sqlite": SqliteReader, "postgres": PostgresReader}


def floor(reader: SqliteReader | PostgresReader, batch: int, n_samples: int) -> Spent:
    """Packed ids, log-probs and cu_seqlens; no masks, versions, rewards, advantages."""
    told: list[Spent] = []
    gc.collect()
    with timed(n_samples, [], told):
        ids, probs, lengths, last = [], [], [], None
        for sample, prompt, payload in reader.rows(batch):
            if sample != last:
                ids.append(np.frombuffer(prompt, "<i4"))
                probs.append(np.zeros(ids[-1].size, np.float32))
                lengths.append(ids[-1].size)
                last = sample
            n = (len(payload) - 1) // 8
            ids.append(np.frombuffer(payload, "<i4", n, 1))
            probs.append(np.frombuffer(payload, "<f4", n, 1 + 4 * n))
            lengths[-1] += n
        np.concatenate(ids, dtype=np.int64), np.concatenate(probs), np.cumsum([0, *lengths])
    return told[0]


def compare(url: str, backend: str, repeat: int) -> tuple[list[Spent], list[Spent]]:
    """(api, floor), taking turns."""
    with samplestore.open(url) as store:
        run = new_run(store, GROUPS)
        with fill(run, GROUPS) as batch:
            reader = READERS[backend](url)
            own, plain = [], []
            for _ in range(repeat):
                plain.append(floor(reader, batch.id, batch.n_samples))
                own.append(api(run, batch))
            reader.db.close()
    return own, plain

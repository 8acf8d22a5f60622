"""The floor: the plain driver, with the same fences on the same tables at the same durability, and nothing else.

No validation, no ledger, no events, no weight versions looked up, no retry. SQLite runs a statement for each
operation, PostgreSQL one statement of binary arrays for a whole commit, which is the fastest that psycopg has.
"""

# ruff: noqa: S608 - only constants of this file are put into statements

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np
from store_data import Spent, timed
from store_rollouts import Piece

from samplestore import wal
from samplestore.run import Run
from samplestore.types import Claim
from samplestore.urls import parse_url, sqlite_module

NOW = {"sqlite": "(julianday('now') - 2440587.5) * 86400.0", "postgres": "extract(epoch from clock_timestamp())"}


def payload(piece: Piece) -> bytes:
    return b"\x01" + piece[0].tobytes() + piece[1].tobytes()


class SqliteFloor:
    APPEND = f"""UPDATE sample SET n_segments = n_segments + 1, n_tokens = n_tokens + ?, logprob_sum = logprob_sum + ?,
        progress_at = {NOW["sqlite"]} WHERE id = ? AND owner = ? AND attempt = ? AND n_segments = ?"""
    INSERT = f"""INSERT INTO segment (sample_id, incarnation, seq, start, n_tokens, kind, loss, version_min,
        version_max, owner, attempt, logprob_sum, created_at, payload)
        VALUES (?, 0, ?, ?, ?, 'generated', 1, 0, 0, ?, ?, ?, {NOW["sqlite"]}, ?)"""
    CLAIM = f"""UPDATE sample SET owner = ?, attempt = attempt + 1, claimed_at = {NOW["sqlite"]} WHERE id IN (
        SELECT id FROM sample WHERE run_id = ? AND owner IS NULL AND closed = 0 AND status IN ('pending', 'aborted')
        ORDER BY priority, status, group_id, "index" LIMIT ?) RETURNING id, attempt, group_id"""
    FINISH = f"""UPDATE sample SET status = 'completed', owner = NULL, finished_at = {NOW["sqlite"]}
        WHERE id = ? AND owner = ? AND attempt = ?"""
    COUNT = "UPDATE sample_group SET n_open = n_open - 1 WHERE id = ? RETURNING n_open"
    READY = "UPDATE sample_group SET state = 'ready' WHERE id = ?"
    PROMPT = "SELECT p.prompt_ids FROM prompt p JOIN sample_group g ON g.prompt_id = p.id WHERE g.id = ?"

    def __init__(self, url: str, durability: str) -> None:
        path = parse_url(url).database
        self.db = sqlite_module().connect(path, isolation_level=None, timeout=60)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute(f"PRAGMA synchronous={durability.upper()}")
        self.db.execute(f"PRAGMA wal_autocheckpoint={wal.PAGES}")
        self.db.execute("PRAGMA cache_size=-65536")

    def append(self, writes: list[tuple[Claim, int, int, Piece]]) -> None:
        """(claim, seq, start, piece) of one commit."""
        run = self.db.execute
        run("BEGIN IMMEDIATE")
        for claim, seq, start, piece in writes:
            n, total = piece[0].size, float(piece[1].sum(dtype=np.float64))
            done = run(self.APPEND, (n, total, claim.sample_id, claim.owner, claim.attempt, seq))
            assert done.rowcount == 1
            run(self.INSERT, (claim.sample_id, seq, start, n, claim.owner, claim.attempt, total, payload(piece)))
        run("COMMIT")

    def claim(self, run_id: int, owner: int, n: int) -> list[Any]:
        run = self.db.execute
        run("BEGIN IMMEDIATE")
        rows = run(self.CLAIM, (owner, run_id, n)).fetchall()
        for group in {row[2] for row in rows}:
            run(self.PROMPT, (group,)).fetchone()
        run("COMMIT")
        return [(id, owner, attempt, group) for id, attempt, group in rows]

    def finish(self, ended: list[tuple[int, int, int, int]]) -> None:
        """(sample, owner, attempt, group) of one commit."""
        run = self.db.execute
        run("BEGIN IMMEDIATE")
        for id, owner, attempt, group in ended:
            assert run(self.FINISH, (id, owner, attempt)).rowcount == 1
            if run(self.COUNT, (group,)).fetchone()[0] == 0:
                run(self.READY, (group,))
        run("COMMIT")

    def close(self) -> None:
        self.db.close()


class PostgresFloor:
    APPEND = f"""WITH given AS (
            SELECT * FROM unnest(%b::bigint[], %b::bigint[], %b::bigint[], %b::bigint[], %b::bigint[], %b::bigint[],
                %b::float8[], %b::bytea[]) AS g(id, owner, attempt, seq, start, n, total, payload)),
        moved AS (
            UPDATE sample s SET n_segments = n_segments + 1, n_tokens = n_tokens + n, logprob_sum = logprob_sum + total,
                progress_at = {NOW["postgres"]}
            FROM given g WHERE s.id = g.id AND s.owner = g.owner AND s.attempt = g.attempt AND s.n_segments = g.seq
            RETURNING s.id)
        INSERT INTO segment (sample_id, incarnation, seq, start, n_tokens, kind, loss, version_min, version_max, owner,
            attempt, logprob_sum, created_at, payload)
        SELECT g.id, 0, seq, start, n, 'generated', 1, 0, 0, owner, attempt, total, {NOW["postgres"]}, payload
        FROM moved JOIN given g ON g.id = moved.id"""
    CLAIM = f"""WITH picked AS MATERIALIZED (
            SELECT id FROM sample WHERE run_id = %s AND owner IS NULL AND closed = 0
                AND status IN ('pending', 'aborted')
            ORDER BY priority, status, group_id, "index" LIMIT %s FOR NO KEY UPDATE SKIP LOCKED)
        UPDATE sample SET owner = %s, attempt = attempt + 1, claimed_at = {NOW["postgres"]}
        WHERE id IN (SELECT id FROM picked) RETURNING id, attempt, group_id"""
    PROMPT = "SELECT p.prompt_ids FROM prompt p JOIN sample_group g ON g.prompt_id = p.id WHERE g.id = ANY(%s)"
    FINISH = f"""WITH ended AS (
            UPDATE sample s SET status = 'completed', owner = NULL, finished_at = {NOW["postgres"]}
            FROM unnest(%b::bigint[], %b::bigint[], %b::bigint[]) AS g(id, owner, attempt)
            WHERE s.id = g.id AND s.owner = g.owner AND s.attempt = g.attempt RETURNING s.group_id)
        UPDATE sample_group g SET n_open = n_open - c.n,
            state = CASE WHEN n_open - c.n = 0 THEN 'ready' ELSE state END
        FROM (SELECT group_id, count(*) AS n FROM ended GROUP BY group_id) c WHERE g.id = c.group_id"""

    def __init__(self, url: str, durability: str) -> None:
        import psycopg

        plain = parse_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self.db = psycopg.connect(plain, autocommit=True)

    def append(self, writes: list[tuple[Claim, int, int, Piece]]) -> None:
        done = self.db.execute(
            self.APPEND,
            (
                [w[0].sample_id for w in writes], [w[0].owner for w in writes], [w[0].attempt for w in writes],
                [w[1] for w in writes], [w[2] for w in writes], [w[3][0].size for w in writes],
                [float(w[3][1].sum(dtype=np.float64)) for w in writes], [payload(w[3]) for w in writes],
            ),
        )  # fmt: skip
        assert done.rowcount == len(writes)

    def claim(self, run_id: int, owner: int, n: int) -> list[Any]:
        with self.db.transaction():
            rows = self.db.execute(self.CLAIM, (run_id, n, owner)).fetchall()
            self.db.execute(self.PROMPT, (list({row[2] for row in rows}),), binary=True).fetchall()
        return [(id, owner, attempt, group) for id, attempt, group in rows]

    def finish(self, ended: list[tuple[int, int, int, int]]) -> None:
        self.db.execute(self.FINISH, tuple([row[i] for row in ended] for i in range(3)))

    def close(self) -> None:
        self.db.close()


FLOORS = {"sqlite": SqliteFloor, "postgres": PostgresFloor}
Floor = SqliteFloor | PostgresFloor


def append(floor: Floor, claims: list[Claim], segments: list[Piece], operations: int, k: int) -> Spent:
    """`operations` appends round the samples, k in a commit."""
    seq, start = defaultdict(int), defaultdict(int)
    waits: list[float] = []
    told: list[Spent] = []
    with timed(operations, waits, told):
        for at in range(0, operations, k):
            writes = []
            for i in range(at, min(at + k, operations)):
                claim, piece = claims[i % len(claims)], segments[i % len(segments)]
                writes.append((claim, seq[claim.sample_id], start[claim.sample_id], piece))
                seq[claim.sample_id] += 1
                start[claim.sample_id] += piece[0].size
            began = time.perf_counter()
            floor.append(writes)
            waits.append(time.perf_counter() - began)
    return told[0]


def life(floor: Floor, run: Run, owner: int, lengths: dict[int, list[Piece]], k: int) -> Spent:
    """Every sample of the run: claimed, appended segment by segment, finished; k operations in a commit.

    lengths   the segments of each sample, by (sample id modulo their number)
    """
    told: list[Spent] = []
    done = 0
    with timed(1, [], told):
        while rows := floor.claim(run.id, owner, k):
            left = {row[0]: lengths[row[0] % len(lengths)] for row in rows}
            for seq in range(max(map(len, left.values()))):
                writes = [
                    (_Fence(id, owner, attempt), seq, seq * 1024, left[id][seq])
                    for id, _, attempt, _ in rows
                    if seq < len(left[id])
                ]
                floor.append(writes)
            floor.finish(rows)
            done += len(rows)
    return Spent(done, told[0].wall_s, told[0].cpu_s)


class _Fence:
    __slots__ = ("attempt", "owner", "sample_id")

    def __init__(self, sample_id: int, owner: int, attempt: int) -> None:
        self.sample_id, self.owner, self.attempt = sample_id, owner, attempt

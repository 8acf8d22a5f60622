"""Other buffers, with the same rollouts, each in a process of its own and in the way that its documentation shows.

    PYTHON store_peers.py straw|transferqueue|torch SAMPLES K

prints one JSON object. K operations go into one call. Durability: straw-queue makes payloads and journal durable before
it answers; TransferQueue keeps samples in the memory of Ray actors; torch.save writes a file without fsync.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from store_rollouts import GROUP, Piece, rollouts

READ = 64 * GROUP


def packed(answers: list[list[Piece]]) -> int:
    """The arrays that a trainer takes, of whole answers; their bytes."""
    ids = np.concatenate([piece[0] for answer in answers for piece in answer], dtype=np.int64)
    probs = np.concatenate([piece[1] for answer in answers for piece in answer])
    return ids.nbytes + probs.nbytes


def decoded(payload: bytes) -> Piece:
    n = len(payload) // 8
    return np.frombuffer(payload, "<i4", n), np.frombuffer(payload, "<f4", n, 4 * n)


def straw(answers: list[list[Piece]], k: int) -> dict[str, float]:
    """A sample is a task; each segment is published, and the task's progress saved."""
    from straw import Coordinator, Publication, SharedFilesystemStore, TaskSpec

    folder = tempfile.mkdtemp(prefix="straw-")
    store = SharedFilesystemStore(folder, "bench")
    coordinator = Coordinator(store, exclusive_owner="bench")
    coordinator.submit_tasks("all", [TaskSpec(f"{i}") for i in range(len(answers))])
    appends, refs, unique = 0, {}, itertools.count()
    began = time.perf_counter()
    while assigned := coordinator.acquire("worker", k).assignments:
        left = {a.lease.task_id: answers[int(a.lease.task_id)] for a in assigned}
        leases = {a.lease.task_id: a.lease for a in assigned}
        refs |= {task: [] for task in left}
        for seq in range(max(map(len, left.values()))):
            tasks = [task for task, answer in left.items() if seq < len(answer)]
            made = store.publish_many(
                [Publication((_record(leases[task], seq, left[task][seq]),)) for task in tasks],
                submission_id=f"publish{next(unique)}",
            )
            for task, ref in zip(tasks, made, strict=True):
                refs[task].append(ref)
            coordinator.save_task_progress_many(
                [{"lease": leases[task], "input_ref": refs[task][-1]} for task in tasks],
                request_id=f"progress{next(unique)}",
            )
            appends += len(tasks)
        for task, lease in leases.items():
            last = refs[task][-1]
            coordinator.complete_task(lease, submission_id=f"done{task}", result_ref=last, result_digest=last.digest)
    wall = time.perf_counter() - began
    began = time.perf_counter()
    n = min(READ, len(answers))
    with store.read_session() as reader:
        packed([[decoded(r.payload) for ref in refs[f"{i}"] for r in reader.read(ref)] for i in range(n)])
    read = time.perf_counter() - began
    coordinator.close()
    store.close()
    shutil.rmtree(folder)
    return {"appends": appends / wall, "lives": len(answers) / wall, "reads": n / read}


def _record(lease: Any, seq: int, piece: Piece) -> Any:
    from straw import Record

    owner = {"task_id": lease.task_id, "attempt_id": lease.attempt_id}
    return Record(f"{lease.task_id}:{seq}", b"".join(array.tobytes() for array in piece), metadata=owner)


def transferqueue(answers: list[list[Piece]], k: int) -> dict[str, float]:
    """Whole samples are put, k in a call: it has no partial ones."""
    import ray
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    def nested(values: list[Any]) -> Any:
        return torch.nested.as_nested_tensor([torch.from_numpy(v) for v in values], layout=torch.jagged)

    whole = [(np.concatenate([p[0] for p in a]), np.concatenate([p[1] for p in a])) for a in answers]
    ray.init(num_cpus=64)  # its actors ask for more than a small machine has, and would wait for ever
    tq.init()
    keys = [f"{i}" for i in range(len(whole))]
    began = time.perf_counter()
    for at in range(0, len(whole), k):
        part = whole[at : at + k]
        fields = TensorDict(
            {"ids": nested([p[0] for p in part]), "logprobs": nested([p[1] for p in part])}, batch_size=len(part)
        )
        tq.kv_batch_put(keys=keys[at : at + k], partition_id="train", fields=fields, tags=[{}] * len(part))
    wall = time.perf_counter() - began
    n = min(READ, len(whole))
    began = time.perf_counter()
    got = tq.kv_batch_get(keys=keys[:n], partition_id="train")
    packed([[(i.numpy(), p.numpy())] for i, p in zip(got["ids"].unbind(), got["logprobs"].unbind(), strict=True)])
    read = time.perf_counter() - began
    tq.close()
    return {"lives": len(whole) / wall, "reads": n / read}


def torch_save(answers: list[list[Piece]], k: int) -> dict[str, float]:
    """The whole list of sample dicts, saved once a step of 256 samples. Its rate falls with every step."""
    import torch

    folder = Path(tempfile.mkdtemp(prefix="torch-"))
    buffer: list[dict[str, Any]] = []
    rates = []
    for at in range(0, len(answers), 256):
        began = time.perf_counter()
        for answer in answers[at : at + 256]:
            buffer.append(
                {
                    "tokens": np.concatenate([p[0] for p in answer]).tolist(),
                    "rollout_log_probs": np.concatenate([p[1] for p in answer]).tolist(),
                }
            )
        torch.save(buffer, folder / "new.pt")
        (folder / "new.pt").rename(folder / "buffer.pt")
        rates.append(len(answers[at : at + 256]) / (time.perf_counter() - began))
    began = time.perf_counter()
    loaded = torch.load(folder / "buffer.pt", weights_only=True)
    part = loaded[:READ]
    packed([[(np.array(s["tokens"], np.int32), np.array(s["rollout_log_probs"], np.float32))] for s in part])
    read = time.perf_counter() - began
    shutil.rmtree(folder)
    return {"lives": rates[-1], "reads": len(part) / read}


PEERS: dict[str, Callable[[list[list[Piece]], int], dict[str, float]]] = {
    "straw": straw, "transferqueue": transferqueue, "torch": torch_save,
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(PEERS[sys.argv[1]](rollouts(int(sys.argv[2])), int(sys.argv[3]))))

"""A trainer to make your own: rows, reward and loss in one file; everything else is samplestore.

    python -m samplestore.examples.reasoning rows 400 > rows.jsonl
    python -m samplestore.examples.reasoning train --db rollouts.db --run sums --model MODEL --checkpoints checkpoints

Any Hugging Face causal language model will do; `python -m samplestore.examples.smollm2` makes one that knows English.
docs/howto/own-trainer.md starts the engine and the worker. Change three functions:

    rows     what is asked
    score    what an answer is worth; the worker calls it, `--reward samplestore.examples.reasoning:score`
    losses   what is learnt from it

The other example, trainer.py, pads its batches and writes GRPO out. This one takes packed batches (no padding), the
advantages that the store computes, and micro-batches by tokens, which is what a real model needs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import samplestore
from samplestore import ratios
from samplestore.errors import SampleStoreError
from samplestore.examples import checkpoints
from samplestore.examples.trainer import TrainerConfig, resume
from samplestore.planning import micro_batches

# ---- your rows


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows of reasoning-gym: {"prompt": messages, "label": str, "metadata": {...}}; the same arguments give the
    same rows. 100 other tasks: another name than chain_sum, see the reasoning-gym documentation."""
    from samplestore.workers.verifiers import reasoning_gym_prompts

    made = reasoning_gym_prompts("chain_sum", n, seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    for row in made:
        question = row["metadata"]["reasoning_gym"]["entry"]["question"]
        row["prompt"] = [{"role": "user", "content": f"{question} Answer with the number only."}]
    return made


# ---- your reward

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
LONGEST = 40  # characters of an answer that is to the point


def score(sample: Any) -> dict[str, Any]:
    """1 for the right number as the last one of a short answer, less for a long one, 0.1 for a wrong number, 0 for
    none. `sample` has slime's names: prompt, response, label, metadata, tokens, status."""
    found = NUMBER.findall(sample.response)
    if not found:
        return {"reward": 0.0, "answer": None}
    answer = found[-1].replace(",", "")
    right = float(answer) == float(sample.label)
    brevity = min(1.0, LONGEST / max(len(sample.response.strip()), 1))
    return {"reward": (0.3 + 0.7 * brevity) if right else 0.1, "answer": answer}


# ---- your loss


def losses(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, cap: float = 2.0) -> Tensor:
    """Loss of each token, float32 [T]: policy gradient, weighed by a truncated importance ratio.

        loss_t = -min(pi_new / pi_old, cap) * A * log pi_new(token_t),   no gradient through the ratio

    The ratio makes up for tokens that older weights wrote; the cap bounds what one of them can do (ratios.truncated).
    log_probs, old, mask float32 [T]; advantages float32 [T], that of the token's sample.
    """
    weight: Tensor = ratios.truncated(ratios.token_ratio(log_probs.detach(), old, mask), cap)
    return -weight * advantages * log_probs * mask


# ---- the rest


@dataclass(frozen=True, slots=True)
class Config:
    """advantages: see samplestore.advantages. tokens: of a forward pass, at most; more if one sample has more."""

    trainer: TrainerConfig
    advantages: str = "rloo"
    tokens: int = 4096


def packed_log_probs(model: Any, tokens: Tensor, position_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi(token_t | those before it in its sample), float32 [T]; 0 where a sample begins.

    One row of all samples: positions that begin again at 0 tell the model where attention must stop, so no sample
    sees another, and no padding is computed. tokens, position_ids int64 [T].
    """
    logits = model(input_ids=tokens[None], position_ids=position_ids[None], use_cache=False).logits[0, :-1]
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = log_probs.gather(-1, tokens[1:, None]).squeeze(-1)
    return torch.cat([chosen.new_zeros(1), chosen]) * (position_ids > 0)


def update(model: Any, optimizer: torch.optim.Optimizer, data: Mapping[str, Tensor], config: Config) -> dict[str, Any]:
    """One optimizer step on a packed batch, micro-batch by micro-batch. Returns what is worth plotting, and
    "log_probs" float32 [T]: those of the weights before the step. Raises ValueError where no token is trained."""
    trained = float(data["loss_mask"].sum())
    if trained == 0:
        raise ValueError("no token of this batch has loss_mask 1; there is nothing to learn from")
    ends = data["cu_seqlens"].tolist()
    lengths = data["cu_seqlens"].diff().tolist()
    log_probs, total = torch.zeros(ends[-1]), 0.0
    optimizer.zero_grad(set_to_none=True)
    model.train()
    for places in micro_batches(lengths, max(config.tokens, *lengths)):
        at = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in places])
        advantages = torch.cat([data["advantages"][i].nan_to_num().expand(lengths[i]) for i in places])
        new = packed_log_probs(model, data["tokens"][at], data["position_ids"][at], config.trainer.grpo.temperature)
        loss = losses(new, data["rollout_log_probs"][at], advantages, data["loss_mask"][at]).sum() / trained
        loss.backward()  # type: ignore[no-untyped-call]
        log_probs[at] = new.detach()
        total += float(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    kl = ratios.kl_k3(log_probs, data["rollout_log_probs"], data["loss_mask"]).sum() / trained
    reward = float(data["rewards"].nanmean())
    return {"loss": total, "reward": reward, "kl": float(kl), "grad_norm": float(norm), "log_probs": log_probs}


def train(store: Any, run: Any, config: Config) -> Iterator[dict[str, float]]:
    """Train up to `config.trainer.steps`; yields the numbers of each step. Can be killed anywhere and started again:
    trainer.py says why this order is safe."""
    settings = config.trainer
    model, optimizer, done = resume(store, run, settings)
    root = settings.checkpoints.resolve()
    for step in range(done + 1, settings.steps + 1):
        with run.batch(step, settings.groups, advantages=config.advantages, timeout=settings.timeout_s) as batch:
            numbers = update(model, optimizer, batch.tensors(), config)
            batch.record_logprobs(numbers.pop("log_probs"))  # beside the engine's, to be compared per token
            path = checkpoints.save(root, step, model, optimizer, settings.model)
        run.publish_weights(path=str(path), step=step)
        checkpoints.prune(root, settings.keep)
        yield {"step": step, **numbers, **run.metrics()}  # a dict of floats: as wandb.log or a TensorBoard writer wants


def main() -> None:
    arguments = _arguments()
    if arguments.what == "rows":
        for row in rows(arguments.n, arguments.seed):
            sys.stdout.write(json.dumps(row) + "\n")
        return
    torch.set_num_threads(arguments.threads)
    settings = TrainerConfig(
        model=arguments.model, checkpoints=arguments.checkpoints, steps=arguments.steps, learning_rate=arguments.lr
    )
    try:
        with samplestore.open(arguments.db, create=False) as store:
            for numbers in train(store, store.existing_run(arguments.run), Config(settings)):
                shown = " ".join(f"{name}={numbers[name]:.4f}" for name in ("reward", "loss", "kl", "grad_norm"))
                print(f"step={numbers['step']} {shown}", flush=True)
    except (SampleStoreError, checkpoints.CheckpointError) as error:
        sys.exit(f"reasoning: {error}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rows of reasoning-gym, and a trainer on them.")
    what = parser.add_subparsers(dest="what", required=True)
    made = what.add_parser("rows", help="write prompt rows as JSON lines")
    made.add_argument("n", type=int)
    made.add_argument("--seed", type=int, default=0)
    train = what.add_parser("train", help="train on a run's batches")
    train.add_argument("--db", required=True, help="SQLite file or postgresql:// URL")
    train.add_argument("--run", default=None, help="name of the run (default: the only one)")
    train.add_argument("--model", type=Path, required=True, help="folder of the untrained model and its tokenizer")
    train.add_argument("--checkpoints", type=Path, required=True, help="folder for checkpoints")
    train.add_argument("--steps", type=int, default=20)
    train.add_argument("--lr", type=float, default=1e-5)
    train.add_argument("--threads", type=int, default=1, help="of torch; engines on the same machine need theirs")
    return parser.parse_args()


if __name__ == "__main__":
    main()

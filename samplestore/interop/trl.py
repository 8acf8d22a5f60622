"""TRL: a rollout_func that is backed by a store, and the reward function that goes with it.

    rollouts = trl.StoreRollouts(run)
    GRPOTrainer(..., rollout_func=rollouts, reward_funcs=trl.stored_reward, callbacks=[rollouts.callback()])

The store says which prompts are trained on; of TRL's data set only the number of rows counts. Groups are leased when
TRL asks for them, consumed when it has saved a checkpoint, and ready again where training begins with an older one.
"""

from __future__ import annotations

from typing import Any

from samplestore.batch import Batch
from samplestore.errors import InvalidSetting, MissingExtra, SampleStoreError
from samplestore.interop.leases import Leases
from samplestore.run import Run
from samplestore.words import amount


class WrongCount(SampleStoreError):
    """A batch has not exactly as many samples as TRL asked for."""

    def __init__(self, step: int, found: int, wanted: int) -> None:
        self.step, self.found, self.wanted = step, found, wanted
        super().__init__(
            f"the batch of step {step} has {amount(found, 'sample')}, and TRL wants exactly {wanted}: groups must be "
            "whole (on_failed=drop, no forks). See: samplestore status"
        )


def rollout(batch: Batch) -> dict[str, list[Any]]:
    """What a rollout_func returns, one entry a sample, groups together.

    prompt_ids, completion_ids   token ids
    logprobs                     of the completion's tokens; 0 where there is none
    env_mask                     1 on tokens that are trained: TRL leaves the others out of the loss
    reward, sample_id, group_id, label   reach reward functions; reward is None where it could not be read
    """
    samples = batch.samples
    return {
        "prompt_ids": [one.prompt_ids.tolist() for one in samples],
        "completion_ids": [one.response_ids.tolist() for one in samples],
        "logprobs": [one.logprobs.tolist() for one in samples],
        "env_mask": [one.loss_mask.tolist() for one in samples],
        "reward": [one.reward for one in samples],
        "sample_id": [one.sample_id for one in samples],
        "group_id": [one.group_id for one in samples],
        "label": [one.label for one in samples],
    }


def stored_reward(completions: list[Any], reward: list[float | None], **others: Any) -> list[float | None]:
    """A reward function for TRL: the rewards that the store has. None leaves a sample out of its group's statistics."""
    return list(reward)


class StoreRollouts:
    """rollout_func(prompts, trainer) for TRL's GRPOTrainer. A step of the run is TRL's global_step.

    timeout   seconds that a step waits for its groups; None waits for ever
    """

    def __init__(self, run: Run, *, timeout: float | None = None) -> None:
        self.leases = Leases(run, timeout=timeout)
        self.run = run
        self._last: int | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """This process's part: as many samples as it was given prompts. One process leases, the others are told, also
        that it failed: they would wait for it until their collectives time out.
        Raises InvalidSetting, WrongCount, BatchTimeout; SampleStoreError on the others."""
        step, n = int(trainer.state.global_step), len(prompts)
        self._check(trainer, step)
        accelerator = trainer.accelerator
        total = n * int(accelerator.num_processes)
        made: list[Any] = [None]
        failed: Exception | None = None
        if accelerator.is_main_process:
            try:
                made = [self._lease(step, total, int(trainer.num_generations))]
            except Exception as error:
                failed, made = error, [f"{type(error).__name__}: {error}"]
        if accelerator.num_processes > 1:
            made = _broadcast(made)
        if failed is not None:
            raise failed
        if isinstance(made[0], str):
            raise SampleStoreError(f"the main process has no batch of step {step}. {made[0]}")
        start = int(accelerator.process_index) * n
        return {name: values[start : start + n] for name, values in made[0].items()}

    def _check(self, trainer: Any, step: int) -> None:
        if not trainer.model.training:
            raise InvalidSetting("eval_strategy", "on", '"no": evaluate with run.evaluate(...), where all is recorded')
        size = self.run.settings.samples_per_prompt
        if int(trainer.num_generations) != size:
            raise InvalidSetting("num_generations", trainer.num_generations, f"{size}, the run's samples_per_prompt")
        if step == self._last:
            raise InvalidSetting(
                "steps_per_generation", getattr(trainer.args, "steps_per_generation", None),
                "gradient_accumulation_steps or more: a step of the run is one generation",
            )  # fmt: skip
        self._last = step

    def _lease(self, step: int, total: int, size: int) -> dict[str, list[Any]]:
        if total % size:
            raise InvalidSetting("generation batch size", total, f"a multiple of {size}: whole groups")
        made = rollout(self.leases.take(step, total // size))
        if len(made["prompt_ids"]) != total:
            raise WrongCount(step, len(made["prompt_ids"]), total)
        return made

    def callback(self) -> Any:
        """TRL's callback that says which checkpoint training begins with, and which are saved. Raises MissingExtra."""
        try:
            from transformers import TrainerCallback
        except ImportError:
            raise MissingExtra("StoreRollouts.callback()", "trainer") from None
        rollouts, leases = self, self.leases

        class Checkpoints(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                rollouts._last = None
                if state.is_world_process_zero:
                    leases.loaded(int(state.global_step) - 1)

            def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                if state.is_world_process_zero:
                    leases.saved(int(state.global_step) - 1)

        return Checkpoints()


def _broadcast(made: list[Any]) -> list[Any]:
    """What the main process has, to all."""
    from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]

    found: list[Any] = broadcast_object_list(made, from_process=0)
    return found

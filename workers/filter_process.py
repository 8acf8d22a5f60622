"""The child that runs the user's filters: `python -m samplestore.workers.filter_process --group SPEC --sample SPEC`.

It speaks the protocol of reward_process: frames of JSON, one request for one answer. A request is a group; the answer
says why it is dropped, and which of its samples are taken out of the loss.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import inspect
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from samplestore.slimehooks import verdict
from samplestore.workers import reward_process as base
from samplestore.workers.slime_types import SlimeSample, misfit, takes_args

Hook = Callable[..., Any]
REMOVED = "custom filter"


def call(hook: Hook, args: Any, given: Any, runner: asyncio.Runner) -> Any:
    """`hook(args, given)` where it is slime's kind of function, else `hook(given)`. May be async."""
    value = hook(args, given) if takes_args(hook) else hook(given)
    return runner.run(base._wait_for(value)) if inspect.isawaitable(value) else value


def load(spec: str | None) -> Hook | None:
    """The function that `spec` names. Raises SpecFailure, also for one that can't be called as filters are: that would
    show with the first group only, and drop every one."""
    if spec is None:
        return None
    hook = base.load(spec)
    if why := misfit(hook, 2 if takes_args(hook) else 1):
        raise base.SpecFailure(f"{spec} can't be called as f(args, samples), nor as f(samples): {why}")
    return hook


def answer(group: Hook | None, sample: Hook | None, request: dict[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    """The reply to one request. Every failure of a hook becomes an error reply."""
    try:
        args = SimpleNamespace(**request["args"])
        samples = [SlimeSample.of(values) for values in request["samples"]]
        ids = [values["sample_id"] for values in request["samples"]]
        drop = None if group is None else verdict(call(group, args, list(samples), runner))
        if sample is not None:
            call(sample, args, [list(samples)], runner)
        marks: list[Any] = [made.remove_sample for made in samples]
        removed = {
            str(id): base.safe_text(mark if isinstance(mark, str) else REMOVED, 200)
            for id, mark in zip(ids, marks, strict=True)
            if mark
        }
    except BaseException as error:  # the user's code: SystemExit too
        return {"id": request["id"], "error": base.describe(error)}
    return {"id": request["id"], "drop": None if drop is None else base.safe_text(drop, 200), "removed": removed}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m samplestore.workers.filter_process", description=__doc__)
    parser.add_argument("--group", help="dynamic sampling filter, MODULE:FUNCTION or FILE.py:FUNCTION")
    parser.add_argument("--sample", help="sample filter")
    parser.add_argument("--memory-mb", type=int, default=2048)
    parser.add_argument("--parent-pid", type=int, default=None)
    args = parser.parse_args(argv)
    base._die_with_parent(args.parent_pid)
    requests, replies = base._take_pipes()
    faulthandler.enable()
    try:
        base._cap_memory(args.memory_mb)
        group, sample = load(args.group), load(args.sample)
    except base.SpecFailure as error:
        base._send(replies, {"spec_error": base.safe_text(str(error), 4000)})
        return 2
    base._send(replies, {"ready": True})
    with asyncio.Runner() as runner:
        own_pid = os.getpid()
        while (request := base._receive(requests)) is not None:
            reply = answer(group, sample, request, runner)
            if os.getpid() != own_pid:
                os._exit(0)  # the hook forked and returned twice; the copy must not answer
            base._send(replies, reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())

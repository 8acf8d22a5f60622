"""The names of a run's numbers, and what each is. They are part of the interface: dashboards are made of them."""

from __future__ import annotations

from samplestore.states import IN_WINDOW, Fate, GroupState, WorkerKind

PREFIX = "samplestore/"
RECENT_GROUPS = 128  # "recent" are the newest so many finished groups
UNDER_WAY = (*IN_WINDOW, GroupState.LEASED)
HAPPENED = {"abort": "aborts", "release": "releases", "reap": "reaps", "resume": "resumes", "fail": "failures"}
LOST = ("aborted", "engine", "lease", "worker", "refused", "other")

NAMES: dict[str, str] = {
    "weights/version": "current weight version",
    "weights/timeline": "timeline: rises with each rewind",
    "tokens/generated": "generated tokens that are stored, over the whole run",
    **{f"tokens/{fate}": f"generated tokens of fate {fate}" for fate in Fate},
    "ledger/imbalance": "1: the kept totals differ from what the window holds, else 0",
    "groups/created": "groups created so far",
    **{f"groups/{state}": f"groups {state}, without those of evaluations" for state in UNDER_WAY},
    "groups/settled": "groups consumed, dropped, stale or superseded; those of evaluations too",
    "groups/window": "groups that admission keeps under way",
    "groups/ready_in_window": "ready groups that a batch of the run's settings takes",
    "groups/per_step": "groups that a step needs",
    "staleness/ready_mean": "mean staleness of ready groups, in versions",
    "staleness/ready_max": "largest staleness of a ready group",
    "samples/in_flight": "samples with a worker",
    "samples/waiting": "samples that wait for a worker, resumable ones too",
    "samples/resumable": "of those, samples that go on from stored tokens",
    "stages/pending": "rewards, filters and other stages that are not done",
    "batch/step": "step of the newest batch",
    "batch/groups": "its groups",
    "batch/samples": "its samples",
    "batch/tokens": "its response tokens",
    "batch/staleness_mean": "mean staleness of its groups when it was leased",
    "batch/staleness_max": "largest of them",
    "batch/reward_mean": "mean reward of its groups",
    "batch/reward_std": "mean reward standard deviation within its groups",
    "batch/response_tokens_mean": "mean tokens of a response in it",
    "batch/truncated_ratio": "share of its samples that were cut by the length limit",
    "batch/resumed_ratio": "share of its samples that were interrupted and resumed",
    "batch/seconds": "from the batch before to this one",
    "batch/tokens_per_second": "its tokens by those seconds",
    "batch/wait_seconds": "from the commit of the batch before to this one: what the trainer waited at most",
    "recent/groups": f"newest finished groups, up to {RECENT_GROUPS}, that the following is about",
    "recent/reward_mean": "mean reward",
    "recent/reward_std": "mean reward standard deviation within a group",
    "recent/zero_std_ratio": "share of groups whose rewards are all equal",
    "recent/dropped_ratio": "share of groups that were dropped",
    "recent/stale_ratio": "share of groups that became too old",
    "recent/response_tokens_mean": "mean tokens of a finished response",
    "recent/truncated_ratio": "share of finished samples that were cut by the length limit",
    "recent/resumed_ratio": "share of samples that were interrupted and resumed",
    "recent/failed_ratio": "share of samples that failed",
    "recent/aborts_per_sample": "interruptions of a sample",
    "recent/cached_ratio": "share of prompt tokens that came from the engines' prefix caches",
    **{f"recent/lost_tokens/{reason}": f"tokens generated and not stored: {reason}" for reason in LOST},
    **{f"last_10_min/{name}": f"{name} of samples in the last ten minutes" for name in HAPPENED.values()},
    **{f"workers/{kind}": f"live {kind} workers" for kind in WorkerKind},
    "workers/silent": "of those, workers whose heartbeat has stopped",
    "engines/live": "engines that answer",
    "engines/failed": "engines that failed",
    "engines/behind": "engines that serve other weights than the run's",
    "engines/running": "requests that run, as engines last told",
    "engines/queued": "requests that wait at the engines, as they last told",
}

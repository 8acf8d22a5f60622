"""What objects and errors say of themselves to whoever looks at them in a notebook or a log."""

from __future__ import annotations

import inspect

import pytest

from samplestore import Store, datasets, words
from samplestore.batches import take
from samplestore.errors import InvalidSetting
from samplestore.run import Run

from ..support import factory as f


@pytest.mark.parametrize(
    ("n", "noun", "said"),
    [
        (0, "group", "0 groups"), (1, "group", "1 group"), (2, "group", "2 groups"), (1234, "batch", "1,234 batches"),
        (1, "leased batch", "1 leased batch"), (2, "reply", "2 replies"), (2, "way", "2 ways"), (2, "loss", "2 losses"),
        (-1, "token", "-1 tokens"),
    ],
)  # fmt: skip
def test_a_number_and_its_noun(n: int, noun: str, said: str) -> None:
    assert words.amount(n, noun) == said


def test_what_is_close_is_meant() -> None:
    assert words.did_you_mean("letters", ["letter", "other"]) == " Did you mean 'letter'?"
    assert words.did_you_mean("LETTERS", ["letters"]) == " Did you mean 'letters'?"
    assert words.did_you_mean("x", ["letters", ""]) == words.did_you_mean("letters", []) == ""


@pytest.fixture
def run(store: Store) -> Run:
    run = f.make_run(store, prompts=2)
    f.finish_all(run, run.register(), n=3)
    return run


def test_a_batch_is_shown_in_a_line(run: Run) -> None:
    with run.batch(4, timeout=60) as batch:
        assert repr(batch) == f"<Batch {batch.id}: step 4, timeline 0, 2 groups, 4 samples, 12 tokens, leased>"
        assert repr(batch.groups[0]) == "<BatchGroupView 0: 2 samples, staleness 0>"
        assert repr(batch.samples[1]) == "<BatchSample 0/1: 3 + 3 tokens, completed, reward None>"
    assert repr(batch).endswith(", settled>")
    assert repr(run.replay(4, rank=1, world=2)).endswith(" tokens, rank 1 of 2, settled>")


def test_an_unknown_option_of_a_batch_is_told_of_what_was_called(run: Run) -> None:
    with pytest.raises(
        TypeError, match=(r"^run\.batch has no option 'max_stalness'\. Did you mean " r"'max_staleness'\? It")
    ):
        run.batch(1, max_stalness=2)
    with pytest.raises(
        TypeError, match=(r"^run\.batch has no option 'device'\. It has: max_staleness, " r"staleness_mode, ")
    ):
        run.batch(1, device="cpu")
    with pytest.raises(TypeError, match=r"^run\.batch_async has no option 'stop'"):
        run.batch_async(1, stop=None)
    with pytest.raises(TypeError, match=r"^samplestore\.datasets has no option 'stop'"):
        datasets.Steps(run, [1], stop=None)
    assert f.states(run) == ["ready", "ready"]


def test_every_option_of_a_batch_is_known(run: Run) -> None:
    options = {name: p.default for name, p in inspect.signature(take).parameters.items() if p.kind is p.KEYWORD_ONLY}
    with run.batch(1, **{**options, "timeout": 60}) as batch:
        assert batch.n_groups == 2


def test_a_value_that_is_not_allowed_is_told_by_the_name_that_was_given(run: Run) -> None:
    """Of a setting, an argument or an option: none is called by the name of another."""
    with pytest.raises(InvalidSetting, match=r"^stale='x' is not allowed; use skip \| "):
        run.batch(1, stale="x")

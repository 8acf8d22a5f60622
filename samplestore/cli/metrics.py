"""samplestore metrics: the run as numbers."""

from __future__ import annotations

from samplestore.cli.common import AsJson, Db, RunName, opened_run
from samplestore.cli.output import emit_json, table


def metrics(db: Db = None, run: RunName = None, as_json: AsJson = False) -> None:
    """The numbers that run.metrics() gives to wandb, trackio or TensorBoard, and workers to Prometheus.

    What is not known is left out.
    """
    from samplestore.queries.metric_names import NAMES, PREFIX

    with opened_run(db, run) as found:
        told, name = found.metrics(), found.name
    if as_json:
        emit_json({"run": name, "metrics": told})
        return
    rows = [(key, int(value) if value.is_integer() else value) for key, value in told.items()]
    table(("metric", "value", "is"), [(key, value, NAMES[key.removeprefix(PREFIX)]) for key, value in rows])

"""docs/reference/python-api.md, from what the package exports."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from typing import Any

from making.pages import cell, code, page, paragraphs, table

API = (
    ("samplestore.store", "Store"),
    ("samplestore.run", "Run"),
    ("samplestore.batch", "Batch"),
    ("samplestore.delivery", "BatchGroupView"),
    ("samplestore.tensors", "BatchSample"),
    ("samplestore.mismatch", "Mismatch"),
    ("samplestore.mismatch", "Distance"),
    ("samplestore.mismatch", "SampleMismatch"),
    ("samplestore.datasets", "Steps"),
    ("samplestore.workers.episodes", "Context"),
    ("samplestore.workers.episodes", "Turn"),
    ("samplestore.media", "Image"),
    ("samplestore.slimehooks", "HookSample"),
    ("samplestore.queries.determinism", "Determinism"),
    ("samplestore.types", "Claim"),
    ("samplestore.types", "StageClaim"),
    ("samplestore.types", "RequestInfo"),
    ("samplestore.types", "WeightVersion"),
    ("samplestore.types", "Added"),
    ("samplestore.types", "Heartbeat"),
    ("samplestore.types", "Reaped"),
    ("samplestore.types", "Finding"),
    ("samplestore.types", "Why"),
    ("samplestore.slime", "StoreDataSource"),
    ("samplestore.slime", "StoreDataBuffer"),
    ("samplestore.interop.leases", "Leases"),
    ("samplestore.interop.trl", "StoreRollouts"),
    ("samplestore.interop.verl", "KeyValues"),
)

FUNCTIONS = (
    ("samplestore.datasets", ("torch_dataset",)),
    ("samplestore.advantages", ("advantages",)),
    ("samplestore.planning", ("plan", "micro_batches")),
    (
        "samplestore.ratios",
        ("log_ratio", "token_ratio", "sequence_ratio", "truncated", "masked", "kl_k1", "kl_k3"),
    ),
    ("samplestore.slime", ("generate_rollout", "observe", "observe_all", "publish_weights")),
    ("samplestore.interop.trl", ("rollout", "stored_reward")),
    ("samplestore.interop.verl", ("dataproto",)),
    ("samplestore.interop.areal", ("trajectories", "trajectory", "samples_of")),
    ("samplestore.interop.prime_rl", ("training_samples", "sample_of")),
    ("samplestore.interop.skyrl", ("generator_output",)),
)


def api() -> str:
    return page(
        "Python API",
        "`import samplestore` costs nothing; names are loaded when they are first used. Each verb of a run is one "
        "transaction and can be repeated. Errors: [errors](errors.md). Settings: [settings](settings.md). "
        "How the verbs go together: [trainer](../howto/trainer.md).",
        _api(),
    )


def _api() -> Iterator[str]:
    import samplestore.batches
    import samplestore.store
    from samplestore import tensors

    yield from ("## samplestore.open", "")
    yield from _function("samplestore.open", samplestore.store.open)
    for module, name in API:
        cls = getattr(import_module(module), name)
        yield from (f"## {name}", "", f"`{module}.{name}`", "")
        if cls.__doc__ and not cls.__doc__.startswith(f"{name}("):
            yield from paragraphs(cls.__doc__)
        if hasattr(cls, "__dataclass_fields__"):
            yield from table(("field", "type"), [(code(f.name), code(f.type)) for f in fields(cls)])
        members = {attribute: value for attribute, value in vars(cls).items() if not attribute.startswith("_")}
        if read := [row for row in (_attribute(*member) for member in members.items()) if row is not None]:
            yield from table(("attribute", "type", ""), read)
        for attribute, value in members.items():
            if inspect.isfunction(value):
                yield from (f"### `{name}.{attribute}`", "")
                yield from _function(attribute, value, skip=("self",))
        if name == "Run":
            yield from ("### Options of `run.batch`", "")
            yield from _function("run.batch", samplestore.batches.take, skip=("run",))
        if name == "Batch":
            yield from ("### What `tensors` and `arrays` return", "", inspect.cleandoc(tensors.__doc__ or ""), "")
    for module, names in FUNCTIONS:
        yield from (f"## {module}", "")
        yield from paragraphs(import_module(module).__doc__)
        for name in names:
            yield from _function(f"{module}.{name}", getattr(import_module(module), name))


def _attribute(name: str, value: Any) -> tuple[str, str, str] | None:
    """Of a property: its name, type, and what it says of itself on one line."""
    made = value.fget if isinstance(value, property) else getattr(value, "func", None)
    if made is None:
        return None
    return code(name), code(inspect.signature(made).return_annotation), cell(inspect.getdoc(value) or "")


def _function(name: str, function: Any, skip: tuple[str, ...] = ()) -> Iterator[str]:
    told = inspect.signature(function)
    told = told.replace(parameters=[p for p in told.parameters.values() if p.name not in skip])
    shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(told))
    if len(name + shown) > 110:
        inner = re.sub(r"(?<=[\w\])'\"*]), (?=\*|\w+:)", ",\n    ", shown[1 : shown.rindex(")")])
        shown = f"(\n    {inner},\n{shown[shown.rindex(')') :]}"
    yield from ("```python", f"{name}{shown}", "```")
    yield ""
    yield from paragraphs(function.__doc__)

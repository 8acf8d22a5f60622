"""Images of prompts: checked, kept once, sent to engines, given to trainers."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from samplestore import Store
from samplestore.errors import NotInRun
from samplestore.images import MAX_IMAGE_BYTES, MAX_IMAGES
from samplestore.prompts import InvalidPrompts, prepare_all
from samplestore.retention import remove
from samplestore.rowvalues import BadValue, check_messages
from samplestore.run import Run
from tests.support import factory as f

PNG = b"\x89PNG\r\n\x1a\n" + b"one"
JPEG = b"\xff\xd8\xff\xe0" + b"two"


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def made(store: Store, images: list[list[Any]], **settings: Any) -> Run:
    run = store.run("r", **{"samples_per_prompt": 2, "groups_per_step": len(images), "epochs": 1, **settings})
    run.add_prompts([{"prompt_ids": [1, 2, i], "images": each} for i, each in enumerate(images)])
    run.admit()
    return run


def test_each_image_is_kept_once(store: Store) -> None:
    """However it was given, in however many prompts, by however many calls."""
    run = made(store, [[PNG, JPEG], [url(PNG)], []])
    again = run.add_prompts([{"prompt_ids": [1, 2, 0], "images": [{"bytes": PNG}, {"base64": base64.b64encode(JPEG)
                                                                                   .decode()}]}])  # fmt: skip
    assert (again.added, again.existing) == (0, 1)
    rows = f.rows(run, "SELECT * FROM prompt_image ORDER BY n_bytes")
    assert [(r["media_type"], r["n_bytes"]) for r in rows] == [("image/jpeg", len(JPEG)), ("image/png", len(PNG))]
    claims = sorted(run.claim(f.register(run), 10), key=lambda c: int(c.prompt_ids[2]))
    first = claims[0]
    assert len(first.images) == 2 and claims[4].images == ()
    found = run.images(first.images)
    assert [found[digest].data for digest in first.images] == [PNG, JPEG]
    with pytest.raises(NotInRun):
        run.images(["0" * 64])


def test_a_trainer_gets_them(store: Store) -> None:
    run = made(store, [[PNG], [JPEG, PNG]])
    f.finish_all(run, f.register(run))
    with run.batch(step=0, groups=2) as batch:
        told = [[image.data for image in each] for each in batch.images]
        wanted = {0: [PNG], 1: [JPEG, PNG]}
        assert told == [wanted[int(s.prompt_ids[2])] for s in batch.samples]
        assert batch.images[0][0] is batch.images[1][0], "siblings share it"
    f.sound(run)


def test_the_key_of_a_prompt_counts_its_images() -> None:
    rows = [{"prompt_ids": [1], "images": images} for images in ([], [PNG], [JPEG], [PNG, JPEG], [JPEG, PNG])]
    prompts, _ = prepare_all(rows)
    assert len({p.content_key for p in prompts}) == 5
    (plain,), _ = prepare_all([{"prompt_ids": [1]}])
    assert plain.content_key == prompts[0].content_key


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (["nowhere.png"], "images[0]"),
        (["https://host/a.png"], "is a URL, and nothing is fetched: give the path"),
        ([{"path": "https://host/a.png"}], "is a URL"),
        ([PNG, b"GIF9 is none"], "images[1]"),
        ([b""], "is empty"),
        (["data:image/png,plain"], "not base64"),
        (["data:image/png;base64,!!"], "can't be read"),
        ([7], "must be bytes"),
        ("one.png", "must be a list"),
        ([PNG] * (MAX_IMAGES + 1), f"the limit is {MAX_IMAGES}"),
        ([PNG + bytes(MAX_IMAGE_BYTES)], "the limit is 20,971,520"),
        ([{"name": "x"}], "must be bytes"),
    ],
)
def test_what_is_no_image(images: Any, told: str) -> None:
    with pytest.raises(InvalidPrompts) as error:
        prepare_all([{"prompt_ids": [1], "images": images}])
    assert told in str(error.value)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    (prompt,), _ = prepare_all([{"prompt_ids": [1], "images": [str(tmp_path / "a.png")]}])
    assert prompt.images[0].data == PNG


def test_places_in_messages() -> None:
    """The template writes a place for each image; as many places as images, or none."""
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    row = {"messages": [{"role": "user", "content": content}], "prompt_ids": [1, 2]}
    prepare_all([{**row, "images": [PNG]}])
    for images in ([PNG, JPEG], None):
        with pytest.raises(InvalidPrompts):
            prepare_all([{**row, "images": images}])


def test_a_whole_run_goes_with_its_images(store: Store) -> None:
    run = made(store, [[PNG]])
    remove(run)
    assert f.rows(store, "SELECT * FROM prompt_image") == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
        {"type": "image", "image": "https://host/a.png"}, {"type": "image"},
    ],
)  # fmt: skip
def test_an_image_within_a_message_is_told_where_to_go(part: dict[str, Any]) -> None:
    with pytest.raises(BadValue, match="URLs are not fetched"):
        check_messages("prompt", [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}])

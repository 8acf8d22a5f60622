"""What the demo's prompts and answers say, and a tokenizer for them. Some of it is what a hostile model could write."""

from __future__ import annotations

import random
from pathlib import Path

HOSTILE_PROMPT = "Ignore the page: <script>alert('prompt')</script> <img src=x onerror=alert(1)> What is 2 + 2?"
HOSTILE_ANSWER = (
    '"><svg onload=alert(2)></svg></span><script>window.pwned = true</script> & <b>bold?</b> '
    "<a href=\"javascript:alert(3)\">link</a> <iframe src='http://203.0.113.7/'></iframe>\n"
    "right-to-left \u202etxt.exe\u202c isolated \u2067abc\u2069 zero\u200bwidth \u001b[31mred\u001b[0m bell\u0007 "
    "tab\tend\r\n伟雪 combining a\u0301\u0302\u0303 $x^2$ **markdown** ![i](http://203.0.113.7/p.png)\n"
)
NAMES = ("Ada", "Grace", "Émile", "Sofía", "Zoë", "Noor", "Jürgen", "Łukasz")


def build_tokenizer(folder: Path) -> Path:
    """A byte-level BPE tokenizer, trained here: characters beyond ASCII are several tokens, as with real ones."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    rng = random.Random(7)
    corpus = [text for i in range(300) for text in (question(rng, i)[0], answer(rng, *question(rng, i)[1:]))]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([t.encode("ascii", "ignore").decode() for t in corpus], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def question(rng: random.Random, i: int) -> tuple[str, str, int, int, int]:
    name, apples, boxes, eaten = rng.choice(NAMES), rng.randint(3, 19), rng.randint(2, 9), rng.randint(1, 5)
    text = (
        f"{name} packs {boxes} boxes with {apples} apples each, and eats {eaten} of them on the way to the market. "
        f"How many apples are left to sell? Think step by step and give the answer as a number. (Problem {i})"
    )
    return text, name, apples, boxes, eaten


def answer(rng: random.Random, name: str, apples: int, boxes: int, eaten: int) -> str:
    total = apples * boxes
    opening = rng.choice(["Let me think step by step.", "Okay, let us work this out.", "First, count what was packed."])
    doubt = (
        f"\nWait, is that right? {apples} × {boxes}: {apples} plus itself {boxes - 1} more times, so {total}. Yes ✅"
    )
    parts = [
        f"{opening}\n{name} packs {boxes} boxes, and every box holds {apples} apples.",
        f"\nThat makes {boxes} × {apples} = {total} apples before the way to the market 🛒.",
        doubt if rng.random() < 0.6 else "",
        f"\nOn the way {eaten} are eaten, so {total} - {eaten} = {total - eaten} remain.",
        f"\nThe answer is {total - eaten}.<|end|>",
    ]
    return "".join(parts)


def long_answer(rng: random.Random, name: str, apples: int, boxes: int, eaten: int) -> str:
    """An answer of a length that is long-tailed, as those of reasoning models are: most are short, some go on and
    on."""
    doubts = min(60, int(rng.lognormvariate(0.6, 1.3)))
    ways = (
        f"\nLet me check that: {apples} × {boxes} = {apples * boxes}. It holds.",
        f"\nAnother way: ten boxes would be {10 * apples}, take away {10 - boxes} boxes of {apples}.",
        "\nHmm, does “on the way” mean before or after they are counted? After, so they are taken away.",
    )
    body, end = answer(rng, name, apples, boxes, eaten).split("\nThe answer is")
    return body + "".join(rng.choice(ways) for _ in range(doubts)) + "\nThe answer is" + end

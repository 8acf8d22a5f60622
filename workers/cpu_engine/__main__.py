"""`python -m samplestore.workers.cpu_engine --model DIR`: the embedded engine as a command."""

from __future__ import annotations

import argparse
import sys

from . import serve_options
from .options import EngineOptions


def build_parser() -> argparse.ArgumentParser:
    """The engine's command line; option names follow SGLang's where the two have the same thing."""
    parser = argparse.ArgumentParser(prog="python -m samplestore.workers.cpu_engine", description=__doc__)
    add = parser.add_argument
    add("--model", "--model-path", dest="model", required=True, help="folder with config.json and *.safetensors")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000, help="0 picks a free port")
    add("--weight-version", default="default", help="label reported until the first weight update")
    add("--max-running", "--max-running-requests", dest="max_running", type=int, default=32)
    add("--max-queued-requests", type=int, default=None, help="more waiting requests than this are refused with 503")
    add("--max-total-tokens", type=int, default=None, help="key/value memory in token slots (rows x longest row)")
    add("--context-length", type=int, default=None)
    add("--threads", type=int, default=1, help="CPU threads of the model")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--incremental-streaming-output", action="store_true", help="stream chunks carry deltas, not everything so far")
    add("--stream-interval", type=int, default=1, help="tokens per stream chunk")
    add("--skip-tokenizer-init", action="store_true", help="token ids in and out only")
    add("--decode-interval", dest="decode_interval_s", type=float, default=0.0, metavar="SECONDS")
    add("--served-model-name", default=None)
    add("--access-log", action="store_true", help="one line per HTTP request on stderr")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the engine; returns the process exit code (0 after a drain, 2 for options or a folder it can't serve)."""
    arguments = build_parser().parse_args(argv)
    try:
        serve_options(EngineOptions(**vars(arguments)))
    except ValueError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The embedded engine: serves a Hugging Face causal LM on the CPU with SGLang's native HTTP protocol.

Importing this package is cheap: torch, transformers and aiohttp are imported when `serve` runs.
"""

from __future__ import annotations

from .options import EngineOptions

__all__ = ["EngineOptions", "serve", "serve_options"]


def serve(
    model: str,
    host: str = "127.0.0.1",
    port: int = 30000,
    *,
    weight_version: str = "default",
    max_running: int = 32,
    max_queued_requests: int | None = None,
    max_total_tokens: int | None = None,
    context_length: int | None = None,
    threads: int = 1,
    dtype: str = "float32",
    incremental_streaming_output: bool = False,
    stream_interval: int = 1,
    skip_tokenizer_init: bool = False,
    token_delay_s: float = 0.0,
    served_model_name: str | None = None,
    access_log: bool = False,
) -> None:
    """Load the model in folder `model` and serve it; blocks until SIGTERM or SIGINT has drained the requests.

    Prints ``engine ready http://host:port`` to stderr once requests are accepted; port 0 picks a free port.
    `max_total_tokens` bounds the key/value memory in token slots (rows x longest row); None sizes it to about 2 GiB.
    `token_delay_s` is the least time in seconds between two decoding steps (0: as fast as the CPU allows).
    Raises `ValueError` for impossible options and `CheckpointError` (a ValueError) for a folder that can't be served.
    """
    serve_options(
        EngineOptions(
            model=model,
            host=host,
            port=port,
            weight_version=weight_version,
            max_running=max_running,
            max_queued_requests=max_queued_requests,
            max_total_tokens=max_total_tokens,
            context_length=context_length,
            threads=threads,
            dtype=dtype,
            incremental_streaming_output=incremental_streaming_output,
            stream_interval=stream_interval,
            skip_tokenizer_init=skip_tokenizer_init,
            decode_interval_s=token_delay_s,
            served_model_name=served_model_name,
            access_log=access_log,
        )
    )


def serve_options(options: EngineOptions) -> None:
    """`serve` for options that are already in one object; same blocking behaviour and errors."""
    from .server import run_server

    run_server(options)

"""What can be set on the embedded engine, and the errors that its parts raise."""

from __future__ import annotations

from dataclasses import dataclass


class CheckpointError(ValueError):
    """A model folder is missing, damaged, or doesn't fit the model being served; nothing was changed."""


class BadRequest(ValueError):
    """A generate request that can't be served; the client gets 400 (in a stream: an error chunk)."""


class ContractError(BadRequest):
    """A request whose shape is wrong (unknown sampling parameter); refused before any stream starts."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of one engine process. Times are seconds, lengths are tokens; None means "from the model"."""

    model: str
    host: str = "127.0.0.1"
    port: int = 30000
    weight_version: str = "default"
    max_running: int = 32
    max_queued_requests: int | None = None
    max_total_tokens: int | None = None
    context_length: int | None = None
    threads: int = 1
    dtype: str = "float32"
    incremental_streaming_output: bool = False
    stream_interval: int = 1
    skip_tokenizer_init: bool = False
    decode_interval_s: float = 0.0
    served_model_name: str | None = None
    access_log: bool = False

    def __post_init__(self) -> None:
        for name in ("max_running", "threads", "stream_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_total_tokens", "context_length"):
            value = getattr(self, name)
            if value is not None and value < 16:
                raise ValueError(f"{name} must be at least 16 tokens, got {value}")
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise ValueError(f"max_queued_requests must not be negative, got {self.max_queued_requests}")
        if not 0 <= self.decode_interval_s < 3600:
            raise ValueError(f"the decode interval must be between 0 and 3600 seconds, got {self.decode_interval_s}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}")

"""What the engines of a fleet are, each as it told: what that means for requests, and which of them do not belong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from samplestore.workers import engine_state
from samplestore.workers.engine_state import Server
from samplestore.workers.replies import MAX_CUMULATIVE_TOKENS, MIN_CUMULATIVE_CHUNK, EngineError


@dataclass(frozen=True, slots=True)
class Needs:
    """What a worker will ask of engines, held against what they and the router can do before anything is asked."""

    streams: bool
    max_new_tokens: int
    sampling: frozenset[str]
    fields: frozenset[str]  # of the request's top level
    routed_experts: bool
    seeded: bool = False


class Members:
    """The engines that told how they were started, by URL; one that was started again tells anew."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self._servers: dict[str, Server] = {}
        self._judged: set[str] = set()  # were held against each other
        self._others: dict[str, str] = {}  # url -> why it serves another model than the rest

    def learn(self, url: str, server: Server, fresh: bool) -> None:
        """fresh: it may have been started since it was last asked. Else its model is the one that it had, whatever
        the config.json of newer weights says. Raises EngineError("setup") where it can't do what this worker will ask.
        """
        require(self.needs, url, server)
        if fresh:
            self._judged.discard(url)
        known = self._servers.get(url)
        self._servers[url] = server if fresh or known is None else replace(server, model=known.model)

    def keep(self, urls: Collection[str]) -> None:
        """The others have gone."""
        self._servers = {url: server for url, server in self._servers.items() if url in urls}

    def judge(self, failed: Collection[str]) -> dict[str, str]:
        """Hold the engines' models against each other. Returns (url, why) of those that serve another one than those
        do that were here before; where all are new, than most do of those that have not failed."""
        models = {url: server.model for url, server in self._servers.items()}
        trusted = [url for url in models if url in self._judged and url not in self._others]
        trusted = trusted or [url for url in models if url not in failed]
        self._others = others(models, trusted)
        self._judged = set(models)
        return self._others

    def why_other(self, url: str) -> str | None:
        """Why an engine does not belong, as last judged."""
        return self._others.get(url)

    # -- what that means for requests

    def _known(self, name: str) -> dict[str, Any]:
        told = {url: getattr(s, name) for url, s in sorted(self._servers.items()) if url not in self._others}
        return {url: value for url, value in told.items() if value is not None}

    @property
    def context_length(self) -> int | None:
        """The shortest: a longer request could be refused."""
        return min(self._known("context_length").values(), default=None)

    @property
    def vocab_size(self) -> int | None:
        """The smallest."""
        return min(self._known("vocab_size").values(), default=None)

    @property
    def stop_ids(self) -> frozenset[int]:
        """End tokens of the model."""
        return frozenset().union(*self._known("stop_ids").values())

    @property
    def image_token(self) -> int | None:
        """The place of an image in a prompt of the model."""
        return next(iter(self._known("image_token").values()), None)

    @property
    def deterministic(self) -> str | None:
        """One that draws by seeds."""
        return next((url for url, told in self._known("deterministic").items() if told), None)

    @property
    def rewriting(self) -> str | None:
        """One that makes tokens of its own of prompts with images."""
        return next((url for url, s in sorted(self._servers.items()) if engine_state.rewrites_beside_images(s)), None)


def others(models: Mapping[str, Mapping[str, Any]], trusted: Collection[str]) -> dict[str, str]:
    """The engines whose model is not that of the trusted ones; without any, not that of most. What one does not tell
    contradicts nothing."""
    among = {url: model for url, model in models.items() if not trusted or url in trusted}
    if not among:
        return {}
    alike = Counter({url: sum(_difference(models[url], other) is None for other in among.values()) for url in among})
    chosen = min(alike, key=lambda url: (-alike[url], url))
    told = {url: _difference(models[chosen], model) for url, model in models.items()}
    return {
        url: f"it serves another model than {chosen}: its {name} is {models[url][name]}, and there "
        f"{models[chosen][name]}"
        for url, name in told.items()
        if name is not None
    }


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    return next((name for name in one if name in other and one[name] != other[name]), None)


def require(needs: Needs, url: str, server: Server) -> None:
    """What cannot work, or would cost too much, is an error now and not a gap in the data later. Raises
    EngineError("setup")."""
    costly = needs.max_new_tokens > MAX_CUMULATIVE_TOKENS and (server.stream_interval or 1) < MIN_CUMULATIVE_CHUNK
    if needs.streams and server.incremental is False and costly:
        raise EngineError(
            "setup",
            f"{url} streams cumulatively, every {server.stream_interval or 1} tokens: of a response of "
            f"{needs.max_new_tokens:,} tokens each would be sent hundreds of times. Start it with: "
            f"--incremental-streaming-output, or with --stream-interval {MIN_CUMULATIVE_CHUNK}; or the worker with "
            "--mode sliced",
        )
    if needs.routed_experts and server.routed_experts is False:
        raise EngineError("setup", f"{url} returns no routed experts. Start it with: --enable-return-routed-experts")
    if needs.seeded and server.deterministic is False:
        raise EngineError(
            "setup",
            f"{url} ignores sampling_seed. Start it with: --enable-deterministic-inference; or make a run without "
            "seeds",
        )

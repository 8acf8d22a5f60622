"""What differs between the engines that are held to the contract."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Traits:
    """A name says what is true where the value is True. A test marked `needs("name")` runs on those engines alone.

    spans                final answers tell which weights made which tokens (weight_versions)
    whole_context        prompt + max_new_tokens may equal the context; else it must stay below
    names_bad_parameter  an unknown sampling parameter is refused as such; else it is HTTP 500
    codes_stream_errors  an error inside a stream carries its status; else only its message
    refuses_duplicates   a request id that is in flight is refused; else both requests get lost
    prefix_aborts        an abort takes every request whose id begins with the given one
    pause_loses_aborts   an abort of a request that came during a pause is not heard, and no later one of it
    hears_in_pause       an abort of a request that came during a pause is heard at once
    flush_while_running  an update with flush_cache=true that finds a frozen request, or one that is just ending or
                         being aborted: "works", "fails" after the weights have changed, or "kills" the server
    flush_after_retract  and one that finds retracted ones works; else that kills the server, and without the flush
                         they go on from keys and values of the old weights
    survives_retraction  a retracted request with log-probs goes on; else that kills the server (on a CPU: it asks for
                         pinned memory)
    hears_disconnects    a stream whose client goes is stopped; else it may run to its end for nobody
    extra_key            requests of different keys share no prefix cache; else the key is ignored
    survives_nan         weights that give NaN are served; else the first request kills the server
    loads                /v1/loads tells what runs and what waits; else it is HTTP 500 beside a new fastapi and
                         --enable-metrics, and only /get_load tells
    """

    spans: bool = True
    whole_context: bool = True
    names_bad_parameter: bool = True
    codes_stream_errors: bool = True
    refuses_duplicates: bool = True
    prefix_aborts: bool = True
    pause_loses_aborts: bool = True
    hears_in_pause: bool = False
    flush_while_running: Literal["works", "fails", "kills"] = "fails"
    flush_after_retract: bool = True
    survives_retraction: bool = True
    hears_disconnects: bool = True
    extra_key: bool = True
    survives_nan: bool = True
    loads: bool = True

    @property
    def survives_flush(self) -> bool:
        return self.flush_while_running != "kills"


_UNTIL_21 = Traits(names_bad_parameter=False, flush_while_running="kills")
_UNTIL_18 = replace(
    _UNTIL_21, spans=False, pause_loses_aborts=False, survives_nan=False, flush_after_retract=False,
    hears_disconnects=False,
)  # fmt: skip
_UNTIL_12 = replace(_UNTIL_18, hears_disconnects=True, codes_stream_errors=False, loads=False)

TRAITS = {
    "embedded": Traits(prefix_aborts=False, pause_loses_aborts=False, hears_in_pause=True, flush_while_running="works"),
    "0.5.23": Traits(),
    "0.5.21": _UNTIL_21,
    "0.5.18": _UNTIL_18,
    "0.5.12.post1": replace(_UNTIL_12, survives_retraction=False),
    "0.5.9": replace(
        _UNTIL_12, flush_after_retract=True, whole_context=False, refuses_duplicates=False, extra_key=False
    ),
}  # fmt: skip

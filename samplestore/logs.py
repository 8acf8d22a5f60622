"""Logging of the commands: standard logging to stderr, as key=value lines or JSON lines, passwords masked.

Ids go into `extra`: log.info("claimed", extra={"sample": 12, "worker": 3}).
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

# user:password@ of a URL. Greedy up to the last @ before a space or slash: a password may hold an @ itself.
_PASSWORD = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^\s:/@]*):(?P<secret>[^\s/]+)@")
_PARAMETER = re.compile(r"(?P<name>\bpassword=)[^&\s'\"]+", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z0-9_.,:;/@*+<>()\[\]%-]+")
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def mask(text: str) -> str:
    """The text with the passwords of all URLs in it replaced by ***."""
    return _PARAMETER.sub(r"\g<name>***", _PASSWORD.sub(r"\g<scheme>\g<user>:***@", text))


class MaskPasswords(logging.Filter):
    """Masks passwords in the message, its extras and its traceback, before any formatter sees them."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = mask(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = mask(record.exc_text)
        if record.stack_info:
            record.stack_info = mask(record.stack_info)
        for key, value in _extras(record).items():
            if not isinstance(value, int | float | bool | None):
                record.__dict__[key] = mask(str(value))
        return True


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    fields: dict[str, Any] = {
        "time": f"{at}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "logger": record.name,
        "msg": record.getMessage(),
        **_extras(record),
    }
    if record.exc_text:
        fields["exception"] = record.exc_text
    if record.stack_info:
        fields["stack"] = record.stack_info
    return fields


class TextFormatter(logging.Formatter):
    """time=... level=info logger=... msg="..." key=value. One line each, whatever the text: a newline in a model's
    answer must not look like another record."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{key}={_quoted(value)}" for key, value in _fields(record).items())


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), default=str)


def _quoted(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)  # json.dumps escapes control and bidi characters


def setup_logging(level: str = "info", format: str = "text") -> None:
    """Send the records of all loggers from `level` up to stderr. Repeating it replaces the former set-up.

    level: debug | info | warning | error; format: text | json. Raises ValueError for anything else.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is not known; use one of {', '.join(LEVELS)}")
    if format not in FORMATS:
        raise ValueError(f"log format {format!r} is not known; use one of {', '.join(FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(MaskPasswords())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)

"""Exit codes, and what each error ends with. Part of the interface: scripts depend on them."""

from __future__ import annotations

import re
import sys

from samplestore.cli.typed import help_to_type, to_type
from samplestore.errors import DatabaseMissing, SampleStoreError, SchemaMismatch, UnsupportedFileSystem

OK = 0
FAILED = 1
USAGE = 2
DATABASE = 3  # missing, unreachable, or of another schema
ENGINE = 4  # an engine does not answer
CHECK = 5  # a check found something
INTERRUPTED = 130

DOCTOR = ("doctor",)  # looks at databases and engines

_COMMAND = re.compile(
    r"samplestore [a-z]|pip install|alembic stamp|apt-get install|createdb|hf download|ps -fp|unset |ls -l|du -|df -"
    r"|mkdir -p|psql|pg_isready|dmesg|(?:run|batch|store|samplestore)\.\w+\(|--\w+|[Rr]epeat the command"
)
_SENTENCES = re.compile(r"(?<!\.)[.?] ")  # what ends with "..." goes on


class CommandError(SampleStoreError):
    """An error of the command line itself; `exit_code` as above. The message ends with what to type next."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def exit_code(error: BaseException) -> int:
    """Errors of other packages (engine clients, configuration) say theirs with an attribute `exit_code`."""
    if isinstance(error, DatabaseMissing | SchemaMismatch | UnsupportedFileSystem):
        return DATABASE
    if isinstance(error, SampleStoreError):
        return int(getattr(error, "exit_code", FAILED))
    return DATABASE if _is_connection_error(error) else FAILED


def _is_connection_error(error: BaseException) -> bool:
    sqlalchemy = sys.modules.get("sqlalchemy.exc")
    return sqlalchemy is not None and isinstance(error, sqlalchemy.OperationalError | sqlalchemy.InterfaceError)


def is_database_error(error: BaseException) -> bool:
    """Of SQLAlchemy or a driver, told without importing them."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    known = {"sqlalchemy.SQLAlchemyError", "sqlite3.Error", "pysqlite3.Error", "psycopg.Error"}
    return bool(names & known)


def with_next_command(error: SampleStoreError) -> str:
    """The message as one paragraph that ends with the next command to type. An error that lists refused rows keeps
    one a line; line breaks in other messages may come from anywhere, and could make up lines of their own."""
    text = _joined(str(error), rows=bool(getattr(error, "rows", None)))
    if _COMMAND.search(_SENTENCES.split(text)[-1]):
        return text
    if look := error.look or (DOCTOR if exit_code(error) in (DATABASE, ENGINE) else ()):
        return f"{ended(text)} Look further with: {to_type(*look)}"
    return f"{ended(text)} See: {help_to_type()}"


def ended(text: str) -> str:
    """As a sentence that another one may follow."""
    return text if text.endswith("?") else f"{text.rstrip('.')}."


def _joined(text: str, *, rows: bool) -> str:
    if not rows:
        return " ".join(text.split())
    return "\n".join(("  " if line.startswith("  ") else "") + " ".join(line.split()) for line in text.splitlines())

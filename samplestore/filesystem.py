"""Which file systems can hold a SQLite WAL database: those whose shared memory and locks belong to one kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from samplestore.errors import UnsupportedFileSystem

NETWORK = frozenset(
    (
        "nfs nfs4 cifs smb smb2 smb3 smbfs lustre gpfs beegfs ceph cephfs 9p virtiofs afs ocfs2 gfs2 "
        "glusterfs orangefs pvfs2 davfs vboxsf fuse fuseblk_remote prl_fs vmhgfs"
    ).split()
)
# FUSE file systems that stay on this machine; every other fuse.* may be remote (sshfs, juicefs, s3fs, ...).
LOCAL_FUSE = frozenset({"fuse.ext2", "fuse.fuse-overlayfs", "fuse.lxcfs"})


def refused(fstype: str) -> bool:
    return fstype in NETWORK or (fstype.startswith("fuse.") and fstype not in LOCAL_FUSE)


def _unescape(field: str) -> str:
    """The mount table writes space, tab, newline and backslash as octal escapes."""
    for escape, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(escape, char)
    return field


def mounts(table: str) -> Iterator[tuple[str, str]]:
    """(mount point, type) of each line of a mount table such as /proc/mounts."""
    for line in table.splitlines():
        parts = line.split()
        if len(parts) >= 3:
            yield _unescape(parts[1]), parts[2]


def mount_of(path: Path, table: str) -> tuple[str, str] | None:
    """The mount that `path` lies on: the longest mount point above it; of equals the last, which hides the others."""
    best: tuple[str, str] | None = None
    for point, fstype in mounts(table):
        if path.is_relative_to(point) and (best is None or len(point) >= len(best[0])):
            best = point, fstype
    return best


def check(path: Path, table: str | None = None) -> None:
    """Raise UnsupportedFileSystem if a SQLite file at `path` would not be safe. `table`: a mount table, for tests."""
    if table is None:
        try:
            table = Path("/proc/mounts").read_text(errors="surrogateescape")
        except OSError:
            return  # not Linux: no mount table to ask; the journal_mode answer is checked at connect
    mount = mount_of(Path(os.path.realpath(path)), table)
    if mount and refused(mount[1]):
        raise UnsupportedFileSystem(str(path), *mount)

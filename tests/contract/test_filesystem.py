"""SQLite files on network and VM-shared file systems are refused, by the mount table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import samplestore
from samplestore import filesystem
from samplestore.errors import UnsupportedFileSystem

LOCAL = ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "fuse.fuse-overlayfs", "ecryptfs"]
# what the case says in words
CASE = next(
    c
    for c in json.loads((Path(__file__).parents[1] / "data" / "cases.json").read_text())["cases"]
    if c["id"] == "network-file-system"
)
REFUSED = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "9p",
    "virtiofs",
    "fuse.sshfs",
    "fuse.juicefs",
    "fuse.s3fs",
]


def table(fstype: str, mount: str = "/mnt/shared") -> str:
    return f"/dev/sda1 / ext4 rw 0 0\nserver:/export {mount} {fstype} rw,vers=4.2 0 0\ntmpfs /tmp tmpfs rw 0 0\n"


def test_the_case_lists_no_type_that_is_missing_here() -> None:
    words = CASE["given"]["database"].replace(",", " ").split()
    named = words[words.index("on") + 1 : words.index("as")]
    assert {w for w in named if w not in ("or", "fuse.*", "(sshfs", "juicefs", "...)")} <= set(REFUSED)


@pytest.mark.parametrize("fstype", REFUSED)
def test_network_types_are_refused(fstype: str) -> None:
    with pytest.raises(UnsupportedFileSystem) as caught:
        filesystem.check(Path("/mnt/shared/runs/rollouts.db"), table(fstype))
    said = str(caught.value)
    assert "/mnt/shared" in said and fstype in said
    assert "PostgreSQL" in said and "local disk" in said


@pytest.mark.parametrize("fstype", LOCAL)
def test_local_types_are_accepted(fstype: str) -> None:
    filesystem.check(Path("/mnt/shared/rollouts.db"), table(fstype))


def test_the_longest_mount_decides_and_the_last_of_equals() -> None:
    mounts = "a / nfs4 rw 0 0\nb /data ext4 rw 0 0\nc /data/in cifs rw 0 0\nd /data/in xfs rw 0 0\ne /dat nfs rw 0 0\n"
    filesystem.check(Path("/data/x.db"), mounts)
    filesystem.check(Path("/data/in/x.db"), mounts)
    with pytest.raises(UnsupportedFileSystem):
        filesystem.check(Path("/home/x.db"), mounts)
    with pytest.raises(UnsupportedFileSystem):
        filesystem.check(Path("/dat/x.db"), mounts)


def test_escapes_of_the_mount_table_are_read() -> None:
    with pytest.raises(UnsupportedFileSystem):
        filesystem.check(Path("/mnt/my share/x.db"), table("nfs4", "/mnt/my\\040share"))


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    with pytest.raises(UnsupportedFileSystem):
        filesystem.check(tmp_path / "near" / "x.db", f"a / ext4 rw 0 0\nb {tmp_path}/far nfs rw 0 0\n")


def test_opening_refuses_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda p, *a, **k: table("nfs4", str(tmp_path)) if str(p) == "/proc/mounts" else read(p, *a, **k),
    )
    with pytest.raises(UnsupportedFileSystem):
        samplestore.open(f"sqlite:///{tmp_path}/x.db")
    assert list(tmp_path.iterdir()) == []

"""Files are there in full or not at all, whoever else is at work in their folder."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from coterie import files
from coterie.files import expect_writable, plain, readable, write_json, write_whole

NOBODY = 65534
posix = pytest.mark.skipif(os.name != "posix", reason="POSIX modes, links and signals")
pytestmark = posix


@contextmanager
def a_user_without_rights():
    """Root may do everything, so that it becomes somebody else for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared():
    """A folder that every user can reach; pytest's own are private."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- what is written --------------------------------------------------------------------------------------------------


def test_text_bytes_and_a_folder_that_is_not_there(tmp_path):
    write_whole(tmp_path / "deep" / "down" / "text", "é\n")
    write_whole(tmp_path / "deep" / "down" / "bytes", b"\xff\x00")
    assert (tmp_path / "deep" / "down" / "text").read_bytes() == "é\n".encode()
    assert (tmp_path / "deep" / "down" / "bytes").read_bytes() == b"\xff\x00"
    assert names(tmp_path / "deep" / "down") == ["bytes", "text"]


def test_json_is_strict_and_utf_8(tmp_path):
    name = os.fsdecode(b"r\xe9s")
    write_json(tmp_path / "a.json", {name: [math.nan, -math.inf, 1.5, (name, None)]})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (tmp_path / "a.json").read_bytes().decode("utf-8")
    assert json.loads(text, parse_constant=refuse) == {"r\ufffds": [None, None, 1.5, ["r\ufffds", None]]}
    assert "\\ud" not in text  # half of a pair is valid in Python's JSON and in few others
    assert plain({"a": 2**70, "b": True}) == {"a": 2**70, "b": True}


def test_text_that_utf_8_cannot_hold_is_written_readably(tmp_path):
    write_whole(tmp_path / "a", "x\udce9y\ud800z")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "x\ufffdy\ufffdz" == readable("x\udce9y\ud800z")


@pytest.mark.parametrize("name", [b"x" * 255, "é".encode() * 127 + b"x", "𝄞".encode() * 63, b"\xff" * 255])
def test_the_longest_names_work(name, tmp_path):
    path = tmp_path / os.fsdecode(name)
    for content in ("old", "new"):
        write_whole(path, content)
        assert path.read_text() == content
    assert os.listdir(os.fsencode(tmp_path)) == [name]


# --- modes and owners -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_honours_the_umask(umask, expected, tmp_path):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert mode(tmp_path / "a") == expected


@pytest.mark.parametrize("kept", [0o600, 0o640, 0o664, 0o755])
def test_a_replaced_file_keeps_its_mode(kept, tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "a").chmod(kept)
    write_whole(tmp_path / "a", "new")
    assert (mode(tmp_path / "a"), (tmp_path / "a").read_text()) == (kept, "new")


def test_a_private_file_is_private_at_every_moment(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")
    (tmp_path / "a").chmod(0o600)
    seen = []
    before = os.umask(0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(files, "_like", lambda _, descriptor: seen.append(os.fstat(descriptor).st_mode & 0o777))
            write_whole(tmp_path / "a", "new")
    finally:
        os.umask(before)
    assert seen == [0o600]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_is_kept_where_possible(shared):
    theirs = shared / "a"
    theirs.write_text("old")
    os.chown(theirs, NOBODY, NOBODY)
    theirs.chmod(0o664)
    write_whole(theirs, "new")
    assert (theirs.stat().st_uid, theirs.stat().st_gid, mode(theirs)) == (NOBODY, NOBODY, 0o664)
    os.chown(theirs, 0, 12345)  # a group that nobody is no member of
    theirs.chmod(0o672)
    with a_user_without_rights():
        write_whole(theirs, "newer")
    assert (theirs.stat().st_uid, theirs.read_text()) == (NOBODY, "newer")
    assert mode(theirs) == 0o622  # and whose rights no other group gets


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_link_at_the_path_is_followed_and_stays(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_text("old")
    (tmp_path / "link").symlink_to("real/a")
    (tmp_path / "again").symlink_to("link")
    write_whole(tmp_path / "again", "new")
    assert (tmp_path / "again").is_symlink()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text() == "new"
    assert names(tmp_path) == ["again", "link", "real"]


def test_a_dangling_link_gets_its_file(tmp_path):
    (tmp_path / "link").symlink_to("new/a")
    expect_writable(tmp_path / "link")
    write_whole(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new" / "a").read_text() == "x"


def test_a_loop_of_links_is_an_error_in_words(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for write in (expect_writable, lambda path: write_whole(path, "x")):
        with pytest.raises(OSError, match="cannot be written: Too many levels of symbolic links") as error:
            write(tmp_path / "a")
        assert error.value.filename == str(tmp_path / "a")
    assert names(tmp_path) == ["a", "b"]


def test_links_planted_at_the_temporary_name_are_not_followed(tmp_path, monkeypatch):
    """Even if somebody could guess it."""
    monkeypatch.setattr("coterie.files.secrets.token_hex", lambda _: "guessed")
    (tmp_path / "victim").write_text("mine")
    for planted in (tmp_path / "victim", tmp_path / "nowhere"):
        (tmp_path / ".coterie-guessed.tmp").symlink_to(planted)
        with pytest.raises(FileExistsError, match="cannot be written"):
            write_whole(tmp_path / "a", "x")
        assert (tmp_path / "victim").read_text() == "mine"
        assert names(tmp_path) == [".coterie-guessed.tmp", "victim"]  # what is not ours is not taken away either
        (tmp_path / ".coterie-guessed.tmp").unlink()


def test_temporary_names_cannot_be_guessed(tmp_path, monkeypatch):
    seen: list[str] = []
    opened = os.open

    def spy(path, flags, *rest, **more):
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            assert flags & os.O_NOFOLLOW
            seen.append(os.path.basename(path))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", spy)
    for _ in range(20):
        write_whole(tmp_path / "a", "x")
    assert len(set(seen)) == 20
    assert all(len(name) >= 16 and str(os.getpid()) != name.split(".")[-1] for name in seen)


# --- many at once, and stops on the way -------------------------------------------------------------------------------

WRITERS = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import files
path, me = Path(sys.argv[1]), sys.argv[3]
def write(thread):
    for _ in range(40):
        files.write_whole(path, f"{me}{thread}" * 20000)
threads = [threading.Thread(target=write, args=(index,)) for index in range(3)]
failed = []
threading.excepthook = lambda told: failed.append(told.exc_value)
for each in threads: each.start()
for each in threads: each.join()
sys.exit(str(failed) if failed else 0)
"""
FOLDER = str(Path(files.__file__).parent)  # files.py alone, without torch, is quick to import


def test_many_processes_and_threads_write_one_file(tmp_path):
    path = tmp_path / "new" / "a"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITERS, path, FOLDER, letter], stderr=subprocess.PIPE, text=True)
        for letter in "abc"
    ]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            found = path.read_text()
            assert found == found[:2] * 20000  # one of them, whole
    assert [writer.communicate()[1] for writer in writers] == [""] * 3
    assert [writer.returncode for writer in writers] == [0] * 3
    assert names(path.parent) == ["a"]


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError()]
)
def test_a_failure_on_the_way_leaves_the_old_file_alone(failure, tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")

    def fail(_: int) -> None:
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(failure)) as error:
        write_whole(tmp_path / "a", "new")
    if isinstance(failure, OSError):
        assert str(error.value) == f"[Errno 28] cannot be written: No space left on device: '{tmp_path / 'a'}'"
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_full_disk_leaves_the_old_file_alone(tmp_path):
    """As the system says it: no file may be larger than a page."""
    (tmp_path / "a").write_text("old")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(OSError, match="cannot be written: File too large"):
            write_whole(tmp_path / "a", "new" * 10000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


STOPPED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import files
def stop(descriptor):
    print(*os.listdir(Path(sys.argv[1]).parent), flush=True)
    os.kill(os.getpid(), int(sys.argv[3]))
    signal.pause()
os.fsync = stop
try:
    files.write_whole(Path(sys.argv[1]), "new")
finally:
    print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_signal_in_the_middle_leaves_nothing_but_the_old_file(how, tmp_path):
    (tmp_path / "a").write_text("old")
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, tmp_path / "a", FOLDER, str(int(how))],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGHUP)],
    )
    assert ".tmp" in done.stdout.splitlines()[0]  # it was in the middle
    assert done.returncode != 0
    assert (tmp_path / "a").read_text() == "old"
    left = [name for name in names(tmp_path) if name != "a"]
    if how == signal.SIGKILL:  # which nothing can tidy up after
        assert all(name.startswith(".coterie-") for name in left)
    else:
        assert left == []
        assert done.stdout.splitlines()[1] == "True"  # handlers are as before


def test_handlers_of_others_stay(tmp_path):
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        write_whole(tmp_path / "a", "x")
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    thread = threading.Thread(target=write_whole, args=(tmp_path / "b", "x"))
    thread.start()
    thread.join()
    assert names(tmp_path) == ["a", "b"]


# --- what cannot be written -------------------------------------------------------------------------------------------


def test_what_cannot_be_written_is_known_beforehand_and_named(shared):
    (shared / "folder").mkdir()
    (shared / "file").write_text("x")
    (shared / "locked").mkdir(mode=0o755)
    (shared / "locked" / "a").write_text("old")
    (shared / "locked" / "a").chmod(0o666)
    (shared / "read-only").write_text("old")
    (shared / "read-only").chmod(0o444)
    cases = {
        shared / "folder": "Is a directory",
        shared / "file" / "a": "Not a directory",
        shared / "locked" / "a": "Permission denied",
        shared / "locked" / "b": "Permission denied",
        shared / "locked" / "deep" / "b": "Permission denied",
        shared / "read-only": "Permission denied",
        shared / ("x" * 256): "File name too long",
    }
    if os.geteuid() != 0:
        (shared / "locked").chmod(0o555)
    for path, words in cases.items():
        for write in (expect_writable, lambda path: write_whole(path, "new")):
            with a_user_without_rights(), pytest.raises(OSError, match=f"cannot be written: {words}") as error:
                write(path)
            assert error.value.filename == str(path)
    (shared / "locked").chmod(0o755)
    assert (shared / "locked" / "a").read_text() == "old" == (shared / "read-only").read_text()
    assert names(shared) == ["file", "folder", "locked", "read-only"]
    assert names(shared / "locked") == ["a"]


def test_to_look_beforehand_makes_nothing(tmp_path):
    expect_writable(tmp_path / "deep" / "down" / "a")
    (tmp_path / "a").write_text("old")
    expect_writable(tmp_path / "a")
    expect_writable(Path(os.devnull))
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_what_is_no_plain_file_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_whole(tmp_path / "link", "hello")
    reader.join(10)
    assert read == ["hello"]
    assert (tmp_path / "pipe").is_fifo()
    code = f"import sys; sys.path.insert(0, {FOLDER!r}); import files, pathlib; " + (
        "files.write_whole(pathlib.Path('/dev/stdout'), 'hello')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "hello"

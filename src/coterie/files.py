"""Files that are there in full or not at all, and what goes into JSON and UTF-8."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

_SURROGATES = re.compile("[\ud800-\udfff]")
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_ENDINGS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]


def readable(text: str) -> str:
    """Text that UTF-8 can hold: a byte of a file name that was not UTF-8, which Python keeps as half of a surrogate
    pair, becomes �.

    >>> import os
    >>> readable(os.fsdecode(bytes([114, 233, 115]))), readable("é")
    ('r�s', 'é')
    """
    return _SURROGATES.sub("\ufffd", text)


def shown(text: str) -> str:
    """`readable` text from outside that steers no terminal and is valid in XML: control characters become � too.

    >>> shown("a" + chr(27) + "[2Jb")
    'a�[2Jb'
    """
    return _UNSEEN.sub("\ufffd", text)


def plain(found: Any) -> Any:
    """What JSON can hold: numbers that are not finite become None, and text is `readable`."""
    if isinstance(found, dict):
        return {plain(key): plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [plain(value) for value in found]
    if isinstance(found, str):
        return readable(found)
    return None if isinstance(found, float) and not math.isfinite(found) else found


def write_json(path: Path, found: Any) -> None:
    """Write JSON by `write_whole`, as strict parsers want it: no NaN, no half of a surrogate pair."""
    write_whole(path, json.dumps(plain(found), indent=1, allow_nan=False))


def read_json(path: Path) -> Any:
    """What a JSON file holds; ValueError, with the path, if it is none."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # of UTF-8, of JSON, of numbers with thousands of digits, of nesting
        raise ValueError(f"path: expected a JSON file, got {path} ({error})") from error


def expect_writable(path: Path) -> None:
    """Raise the OSError that `write_whole` would raise, as far as it can be known before there is something to write.

    Nothing is made: of a folder that is not there, the nearest one above it is looked at.
    """
    with _named(path):
        target, before = _target(path)
        if before is None:
            above = next(folder for folder in target.parents if folder.exists())
            if not above.is_dir():
                _refuse(errno.ENOTDIR)
        else:
            above = target.parent
        effective = os.access in os.supports_effective_ids
        if (before is None or stat.S_ISREG(before.st_mode)) and not os.access(
            above, os.W_OK | os.X_OK, effective_ids=effective
        ):
            _refuse(errno.EACCES)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, and its folder if need be; whatever happens on the way, what was there before stays whole.

    The content goes into a new file beside the target, under a name that nobody can guess, which is then synced to
    the disk and renamed: readers, other writers and a power cut see the old file or the new one. Of many writers at
    once the last one wins. An exception, Ctrl-C, SIGTERM or SIGHUP (in the main thread) leaves nothing behind;
    SIGKILL may leave a file named `.coterie-….tmp`.

    A file that is replaced keeps its mode, and its owner and group if the system lets us; its hard links, ACLs and
    extended attributes are not carried over. A new one gets what the umask leaves. A file that is read-only stays.
    A link at the path itself is followed, as a shell's `>` does, also to a file that is not there yet; what is no
    plain file (a pipe, /dev/stdout) is written to as it is.
    """
    data = content if isinstance(content, bytes) else readable(content).encode()
    with _named(path):
        target, before = _target(path)
        if before is not None and not stat.S_ISREG(before.st_mode):
            path.write_bytes(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".coterie-{secrets.token_hex(8)}.tmp")
        with _unwound():
            try:
                descriptor = os.open(temporary, _NEW, 0o666 if before is None else 0o600)
                with open(descriptor, "wb") as file:
                    if before is not None:
                        _like(before, file.fileno())
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            except FileExistsError:  # somebody else's, so it stays
                raise
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise


def _target(path: Path) -> tuple[Path, os.stat_result | None]:
    """Where a path leads to, and what is there: something that may be written to, or nothing."""
    try:
        before = path.stat()  # by the system itself, which knows links that are not to be followed
    except FileNotFoundError:
        return Path(os.path.realpath(path)), None
    if stat.S_ISDIR(before.st_mode):
        _refuse(errno.EISDIR)
    if stat.S_ISREG(before.st_mode):
        os.close(os.open(path, os.O_WRONLY))  # a rename asks the folder alone
    return Path(os.path.realpath(path)), before


def _like(before: os.stat_result, descriptor: int) -> None:
    """Give a file the owner, the group and the mode of another one."""
    mode, now = stat.S_IMODE(before.st_mode) & 0o777, os.fstat(descriptor)
    if hasattr(os, "fchown") and (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
        with suppress(PermissionError):  # giving a file away is root's right, its group that of the group's members
            os.fchown(descriptor, -1, before.st_gid)
            os.fchown(descriptor, before.st_uid, -1)
        if os.fstat(descriptor).st_gid != before.st_gid:
            mode = mode & ~0o070 | (mode & 0o007) << 3  # another group may do what everybody may
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, mode)


@contextmanager
def _unwound() -> Iterator[None]:
    """Meanwhile, signals that would end the process on the spot end it as Ctrl-C does, through every `except`.

    Those that somebody handles are left alone, and so are all of them outside the main thread: Python sets handlers
    there alone.
    """
    mine = threading.current_thread() is threading.main_thread()
    taken = [number for number in _ENDINGS if mine and signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    try:
        for number in taken:
            signal.signal(number, end)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors name the file that a user asked for, not the one beside it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror or error}", str(path)) from error


def _refuse(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))

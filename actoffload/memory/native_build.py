"""Builds the C++ programs: each once, into the user's cache directory, with the user's compiler.

Nothing here is needed for a right gradient: where there is no compiler, a reason says so and Python does the work.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PACKAGE = Path(__file__).parents[1]
SWITCH = "ACTOFFLOAD_NATIVE"
"""Set to 0, this environment variable has nothing built or loaded, set to a program's name only that program."""
COMPILE_S = 300
NOEXEC = getattr(os, "ST_NOEXEC", 0)
"""The flag of a file system from which no library can be loaded."""


class Refused(Exception):
    """Why compiled code is not used here."""


def with_torch(*libraries: str) -> tuple[list[str], list[str]]:
    """Options and key for a source that uses PyTorch's headers, c10 and those of its libraries, which are loaded.

    Raises:
        Refused: there is no PyTorch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Refused("PyTorch is not installed")
    root = Path(spec.origin).parent
    linked = [f"-L{root / 'lib'}", *(f"-l{library}" for library in ("c10", *libraries))]
    return [f"-I{root / 'include'}", *linked], [(root / "version.py").read_text(encoding="utf-8")]


def build(source: Path, options: Sequence[str], key: Sequence[str]) -> Path:
    """Compile a C++ source into a shared library, unless that was done before; return the library's path.

    Args:
        options: of the compiler: where headers and libraries are.
        key: further dependencies of the library, such as PyTorch's version.

    Raises:
        Refused: there is no compiler, it failed, or `SWITCH` forbids it.
    """
    switch = os.environ.get(SWITCH) or "1"
    if switch not in ("1", source.stem):
        raise Refused(f"{SWITCH}={switch} is set")
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Refused("there is no C++ compiler (c++, g++, clang++ or CXX)")
    digest = hashlib.sha256(source.read_bytes())
    for header in sorted(source.parent.glob("*.hpp")):
        digest.update(header.read_bytes())
    for text in (*key, *options, compiler):
        digest.update(b"\0" + text.encode())
    folder = _cache_folder()
    library = folder / f"{source.stem}-{platform.machine()}-{digest.hexdigest()[:20]}.so"
    if not _is_whole(library):
        message = f"actoffload: compiling {source.name} once, about 10 s, into {folder}"
        with suppress(OSError, ValueError):  # as in `tell.report.say`
            print(message, file=sys.stderr, flush=True)
        _compile(compiler, source, options, library)
    return library


def _is_whole(library: Path) -> bool:
    """Return whether a library is there with its end: to load a part of one ends the process, at each start."""
    try:
        with library.open("rb") as file:
            header, nbytes = file.read(64), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
        return True  # if it is damaged, it cannot be loaded, which is an ordinary error
    sections, (size, number) = struct.unpack_from("<Q", header, 40)[0], struct.unpack_from("<HH", header, 58)
    end: int = sections + size * number  # a linker writes this table last
    return nbytes >= end


def load(build: Callable[[], Path], loader: Callable[[Path], T]) -> T:
    """Return the loader's result for a library, which is built anew, once, if it cannot be loaded.

    Raises:
        Refused: it cannot be built or loaded.
    """
    path = build()
    try:
        return loader(path)
    except (ImportError, OSError):  # damaged, or made on a newer system that shares the home directory
        path.unlink(missing_ok=True)
        path = build()
        try:
            return loader(path)
        except (ImportError, OSError) as error:
            raise Refused(f"the compiled library could not be loaded: {error}") from error


def told(error: Exception) -> str:
    """The reason in an error, for a person."""
    return str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"


def _compile(compiler: str, source: Path, options: Sequence[str], library: Path) -> None:
    unfinished = library.with_name(f"{library.name}.{os.getpid()}.{threading.get_ident()}")
    said = ""
    try:
        for standard in ("c++20", "c++17"):  # the standard of PyTorch's headers depends on its release
            command = [compiler, f"-std={standard}", "-O2", "-fPIC", "-shared", str(source), "-o", str(unfinished)]
            done = subprocess.run(
                [*command, *options],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMPILE_S,
                check=False,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C"},
            )
            if done.returncode == 0:
                with unfinished.open("rb") as file:  # a power cut may leave a part of it, and to load that is a crash
                    os.fsync(file.fileno())
                unfinished.replace(library)  # at once: other processes may look for it now
                return
            said = said or next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"the C++ compiler failed: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    raise Refused(f"the C++ compiler failed: {said.strip()}")


def _cache_folder() -> Path:
    """Return a directory for libraries to be loaded from, which only this user can write to or exchange.

    Raises:
        Refused: there is none.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    temporary = Path(tempfile.gettempdir()) / f"actoffload-{os.geteuid()}"
    for folder in (cache / "actoffload", temporary):
        if not folder.is_absolute():
            continue
        try:
            _make_private(folder)
            folder = folder.resolve()
            fit = folder.stat().st_uid == os.geteuid() and not os.statvfs(folder).f_flag & NOEXEC
            if fit and os.access(folder, os.W_OK | os.X_OK) and not any(map(_is_shared, (folder, *folder.parents))):
                return folder
        except OSError:
            continue
    raise Refused(f"neither {cache} nor {temporary.parent} can hold it; set XDG_CACHE_HOME to a directory of yours")


def _make_private(folder: Path) -> None:
    """Make a directory, and its missing parents, for this user alone, under any umask."""
    if not folder.is_dir():
        _make_private(folder.parent)
        with suppress(FileExistsError):  # another process was faster
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)  # the umask may have taken bits away


def _is_shared(folder: Path) -> bool:
    """Return whether other users may exchange the files in a directory. If it is sticky they cannot."""
    found = folder.stat()
    trusted = found.st_uid in (0, os.geteuid(), Path("/").stat().st_uid)  # the owner of the root may do anything
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    return not trusted or bool(others_write)

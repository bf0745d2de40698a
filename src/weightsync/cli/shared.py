"""What the commands share: the token's option, errors as one line, text that a terminal can't be moved by."""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Annotated, TextIO

import typer

from weightsync.errors import AuthError, ConfigError, SignatureError, StoreAuthError, WeightSyncError
from weightsync.types.process import closed_in_children

_GIVEN = ("COMMANDLINE", "ENVIRONMENT")
TOKEN_VARIABLE = "WEIGHTSYNC_TOKEN"
BROKEN_PIPE = 141
"""The exit code of a process that SIGPIPE ends, as a shell shows it."""
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NUDGES, _NUDGE_S = 3, 0.1
_forking = threading.local()
MAX_S = 7 * 86_400.0
"""No wait is longer than a week, as in `types.deadline`."""

Token = Annotated[
    str | None,
    typer.Option(
        envvar=TOKEN_VARIABLE, help="Bearer token; a server's has at least 16 characters. Better by the variable."
    ),
]

TrustKey = Annotated[
    str | None,
    typer.Option(
        "--trust-key", metavar="FILE", envvar="WEIGHTSYNC_TRUST_KEY",
        help="Public key of weightsync keygen: only what it has signed is taken from a store.",
    ),
]  # fmt: skip
Verify = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="PEM file of the authority of what answers by https; the system's otherwise."),
]


def was_given(context: typer.Context, name: str, *, by: Container[str] = _GIVEN) -> bool:
    """Whether the user said it, on the command line or by a variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in by


def refuse_given(context: typer.Context, names: Iterable[str], why: str, *, by: Container[str] = _GIVEN) -> None:
    """Options that would do nothing are refused, where the user gave one.

    Raises:
        ConfigError: it names them, and says `why`.
    """
    given = [name for name in names if was_given(context, name, by=by)]
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{named} would do nothing: {why}, or leave out {named}")


def refuse_trust_key(context: typer.Context, sources: Iterable[str]) -> None:
    """Where none of these is a place in a store. The variable is let pass: it may stand for all that a host runs.

    Raises:
        ConfigError: --trust-key was given.
    """
    from weightsync.objects.urls import is_store_url

    if not any(is_store_url(each) for each in sources):
        why = "an agent's versions are not signed; name a place in a store, s3://bucket/run"
        refuse_given(context, ("trust_key",), why, by=("COMMANDLINE",))


def sigterm_raises() -> None:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that what it holds, of /dev/shm say, is given back."""

    def ended(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, ended)
    _at_hangup(ended)


def _at_hangup(act: Callable[[int, object], None] | signal.Handlers) -> None:
    """What SIGHUP does: a terminal was closed, or its ssh dropped. Under nohup it is ignored, and stays so."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, act)


def next_signal_ends() -> None:
    """The next SIGINT or SIGTERM ends this process at once. SIGHUP does not: who closes a terminal may send two."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def signals_end_waits() -> None:
    """SIGINT, SIGTERM and SIGHUP end also what the main thread begins to wait for just then. The main thread calls it.

    Python's handler would run behind that wait, see `_watched`: of an engine that is silent, half a minute later. So
    the main thread is given other signals, which only end its calls.
    """
    main = threading.get_ident()

    def nudge() -> bool:
        for _ in range(_NUDGES):
            time.sleep(_NUDGE_S)
            signal.pthread_kill(main, signal.SIGURG)
        return True

    signal.signal(signal.SIGURG, lambda *_: None)
    thread, _ = _watched(nudge)
    closed_in_children(thread, _deaf)


def stop_event() -> threading.Event:
    """What SIGINT, SIGTERM and SIGHUP set, from here on. The main thread calls it."""
    event = threading.Event()
    _, write = _watched(event.set)

    def heard(number: int, _: object) -> None:  # a second byte does no harm; a loop of asyncio may take the first
        _said(write, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, heard)
    _at_hangup(heard)
    return closed_in_children(event, _signals_of_its_own)


def _watched(act: Callable[[], bool | None]) -> tuple[threading.Thread, int]:
    """A thread that acts when a signal of `_ENDS` comes, until it has not returned True; and where to tell it of one.

    A byte is written by C code, the moment that the signal comes: a handler of Python's runs in the main thread, and
    not before that leaves the call that it waits in. A signal just before such a wait, or one that the system gives to
    another thread, ends none.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)

    def watch() -> None:
        while os.read(read, 1)[0] not in _ENDS or act():
            pass

    thread = threading.Thread(target=watch, name="weightsync-signals", daemon=True)
    thread.start()
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return thread, write


def _deaf(_: object) -> None:
    """A child that was forked shares the descriptor: a signal to it would be its parent's."""
    signal.set_wakeup_fd(-1)


def _signals_of_its_own(_: threading.Event) -> None:
    _deaf(_)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _at_hangup(signal.SIG_DFL)


def _unheard() -> None:
    """Before a fork, in the thread that forks: until the child has handlers of its own it is given no signal."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)


def _heard_again() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


os.register_at_fork(before=_unheard, after_in_parent=_heard_again, after_in_child=_heard_again)


def _said(write: int, number: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.write(write, bytes([number]))


@contextlib.contextmanager
def told(*, otherwise: int = 1, of_files: int = 1) -> Iterator[None]:
    """Typed errors as one line on standard error, and the exit code: 2 for what the user gave, `of_files` for an
    OSError, and of what remains `otherwise`."""
    try:
        yield
    except WeightSyncError as error:
        print(in_words(error), file=sys.stderr)
        raise typer.Exit(2 if is_the_users(error) else otherwise) from None
    except ImportError as error:
        print(f"this command needs torch: pip install 'weightsync[torch]' ({error})", file=sys.stderr)
        raise typer.Exit(2) from None
    except OSError as error:  # a disk that is full, a file that is not there
        if reader_has_gone(error):
            raise typer.Exit(BROKEN_PIPE) from None
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(of_files) from None


def announce(text: str, *, file: TextIO | None = None) -> None:
    """A line of a command that runs on: where it can't be written, as on a disk that is full, it is lost, and nothing
    else is. A reader that has gone ends the command.

    Raises:
        BrokenPipeError: it has.
    """
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        if reader_has_gone(error):
            raise


def in_words(error: Exception) -> str:
    """An error as a line; of a token that is refused, how a command is given one."""
    if isinstance(error, AuthError) and not isinstance(error, StoreAuthError | SignatureError):
        message, ours = error.message, f"--token or the variable {TOKEN_VARIABLE}"
        error.message = message.replace(f"token= or {TOKEN_VARIABLE}", ours)
        if TOKEN_VARIABLE not in message:
            error.message += f"; give it by {ours}"
    return f"{type(error).__name__}: {error}"


def reader_has_gone(error: Exception) -> bool:
    """Whether it is that nobody reads standard output any more. A pipe to a process that was started here breaks in the
    same way, and that is to be said."""
    if not isinstance(error, BrokenPipeError) or sys.stdout is None:
        return False
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError):  # no file at all
        poll.register(sys.stdout, 0)
        return bool(poll.poll(0))
    return False


def is_the_users(error: Exception) -> bool:
    """Whether what the user gave is at fault: an option, a file, a URL or a token."""
    return isinstance(error, ConfigError | AuthError) and not isinstance(error, SignatureError)


def own_name(command: str) -> str:
    """A receiver_id that nobody else has: two of one name would end each other's transfers."""
    return f"weightsync {command} {socket.gethostname()[:100]}/{os.getpid()}/{secrets.token_hex(4)}"


def is_terminal() -> bool:
    """Whether somebody sees the output at once; it may be closed (`>&-`)."""
    return sys.stdout is not None and sys.stdout.isatty()


def flowing(text: str) -> str:
    """A docstring whose paragraphs have no line breaks of their own, so that a terminal of any width breaks them; what
    is indented stays as it is."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else part.replace("\n", " ") for part in parts)


def plain(text: str) -> str:
    """A text from elsewhere as one line without control characters: a name must not move a terminal's cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)

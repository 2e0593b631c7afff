"""Runs an iterator on a background thread, a bounded number of items ahead.

Why not torch's DataLoader: the work is one numpy gather and now and then a row group to decode, both of which release
the interpreter lock for most of their time; processes would have to pickle or share every batch, and would make the
position of what was trained a matter between processes. One thread keeps the order by construction.

What is promised: items come in order; an exception of the iterator is raised in the consumer, after the items before
it, with its own type, message and traceback; `close` stops and joins the thread whatever it is doing (it finishes the
item in hand first, unless the iterator looks at the stop flag too), and so does leaving the interpreter. A generator is
closed in the thread.

Dropping the last reference stops the thread and does not wait for it. What is dropped in a cycle is collected in
whatever thread happens to allocate, at any line: one that this thread waits for, or this thread itself, with any lock
in its hands. So a finalizer takes no lock and waits for nothing: it raises a plain flag, and the queues are
SimpleQueues, whose `put` may interrupt any other call of theirs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")


class StopFlag:
    """A threading.Event that nobody waits for, without its lock: a finalizer may raise it anywhere."""

    def __init__(self) -> None:
        self.raised = False


class OwnThread(threading.Thread):
    """A thread of this package. None of them waits for another in `join_ended`, wherever that was called."""

    def join_ended(self) -> None:
        """Wait for the end of a thread that was told to end."""
        if not isinstance(threading.current_thread(), OwnThread):
            self.join()


class _End:
    """What the thread sends last: the exception that ended it, or None."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Generic[Item]):
    """An iterator over `source` that stays `depth` items ahead."""

    def __init__(self, source: Iterator[Item], *, depth: int, name: str, stop: StopFlag | None = None) -> None:
        """stop: raised when the thread is to end; for a source that can end in the middle of an item."""
        self._items: SimpleQueue[Item | _End] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()  # one entry for each item that may be put
        for _ in range(depth):
            self._room.put(None)
        self._ended = False
        stop = StopFlag() if stop is None else stop
        # The thread holds no reference to self, so that dropping the iterator stops it.
        self.thread = OwnThread(target=_produce, args=(source, self._items, self._room, stop), name=name, daemon=True)
        self._finish = weakref.finalize(self, _stop, stop, self._room, self.thread)
        self.thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._ended or not self._finish.alive:
            raise StopIteration
        item = self._items.get()
        self._room.put(None)
        if isinstance(item, _End):
            self._ended = True
            self.close()
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item

    def close(self) -> None:
        """Stop and join the thread; in a thread of this package, only stop it. Idempotent."""
        self._finish()
        self.thread.join_ended()
        self._items = SimpleQueue()  # lets go of what was made and not taken


def _produce(source: Iterator[Item], items: SimpleQueue[Item | _End], room: SimpleQueue[None], stop: StopFlag) -> None:
    try:
        for item in source:
            room.get()
            if stop.raised:
                break
            items.put(item)
    except BaseException as error:
        items.put(_End(error))
    else:
        items.put(_End(None))
    finally:
        # A generator ends here and now, with whatever threads it has of its own.
        if isinstance(source, Generator):
            source.close()


def _stop(stop: StopFlag, room: SimpleQueue[None], thread: threading.Thread) -> None:
    stop.raised = True
    room.put(None)  # lets a thread that waits for room see the flag
    main = threading.main_thread()
    if threading.current_thread() is main and not main.is_alive():
        # Leaving the interpreter: a thread that is still in C++ when it is gone would crash.
        thread.join()

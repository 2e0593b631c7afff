"""Runs an iterator on a background thread, a bounded number of items ahead.

Why not torch's DataLoader: the work is one numpy gather and now and then a row group to decode, both of which release
the interpreter lock for most of their time; processes would have to pickle or share every batch, and would make the
position of what was trained a matter between processes. One thread keeps the order by construction.

What is promised: items come in order; an exception of the iterator is raised in the consumer, after the items before
it, with its own type, message and traceback; `close` stops and joins the thread whatever it is doing (it finishes the
item in hand first), and so does dropping the last reference or leaving the interpreter. A generator is closed there.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _End:
    """What the thread sends last: the exception that ended it, or None."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Generic[Item]):
    """An iterator over `source` that stays `depth` items ahead."""

    def __init__(self, source: Iterator[Item], *, depth: int, name: str) -> None:
        self._queue: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
        self._ended = False
        stop = threading.Event()
        # The thread holds no reference to self, so that dropping the iterator stops it.
        thread = threading.Thread(target=_produce, args=(source, self._queue, stop), name=name, daemon=True)
        self._finish = weakref.finalize(self, _stop, stop, self._queue, thread)
        thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._ended or not self._finish.alive:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, _End):
            self._ended = True
            self.close()
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item

    def close(self) -> None:
        """Stop and join the thread. Idempotent."""
        self._finish()


def _produce(source: Iterator[Item], sink: queue.Queue[Item | _End], stop: threading.Event) -> None:
    try:
        for item in source:
            sink.put(item)
            if stop.is_set():
                return
    except BaseException as error:
        sink.put(_End(error))
    else:
        sink.put(_End(None))
    finally:
        # A generator ends here and now, with whatever threads it has of its own.
        if isinstance(source, Generator):
            source.close()


def _stop(stop: threading.Event, sink: queue.Queue[Item | _End], thread: threading.Thread) -> None:
    stop.set()
    # Making room lets a blocked put() return; after it the thread sees `stop`, so it blocks at most once more.
    while thread.is_alive():
        try:
            sink.get(timeout=0.01)
        except queue.Empty:
            continue
    thread.join()

"""The worker's inbox: order, Stop before everything, and what waiting is counted as."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from shmloader.workers.channel import Channel, pair
from shmloader.workers.inbox import Inbox, Orphaned, Stopped
from shmloader.workers.protocol import INLINE_BYTES, NO_LAYOUT, Tag


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Inbox]]:
    """The main process's end, and the worker's inbox."""
    here, end = pair()
    there = Channel(end)
    yield here, Inbox(there)
    here.close()
    there.close()


def send(here: Channel, tag: int, batch: int = 0, body: bytes = b"") -> None:
    here.send(tag, 0, NO_LAYOUT, 0, batch, 0, 0, body)


def test_messages_come_out_in_order(ends: tuple[Channel, Inbox]) -> None:
    here, inbox = ends
    for batch in range(5):
        send(here, Tag.FILL, batch)
    assert [inbox.take().batch for _ in range(5)] == list(range(5))


def test_a_stop_goes_before_everything_that_is_still_to_be_done(ends: tuple[Channel, Inbox]) -> None:
    here, inbox = ends
    for batch in range(3):
        send(here, Tag.FILL, batch)
    assert inbox.take().batch == 0
    send(here, Tag.STOP)
    with pytest.raises(Stopped):
        inbox.take()


def test_a_grant_overtakes_what_was_sent_before_it(ends: tuple[Channel, Inbox]) -> None:
    here, inbox = ends
    send(here, Tag.FILL, 1)
    send(here, Tag.FILL, 2)
    send(here, Tag.GRANT, 9)
    assert inbox.take_grant().batch == 9
    assert [inbox.take().batch for _ in range(2)] == [1, 2]


def test_a_body_of_thousands_of_fragments_arrives_whole(ends: tuple[Channel, Inbox]) -> None:
    here, inbox = ends
    body = os.urandom(1500 * INLINE_BYTES)

    def feed() -> None:
        send(here, Tag.FILL, 1, body)
        while here.backlog:
            here.flush()

    feeder = threading.Thread(target=feed)
    feeder.start()
    assert inbox.take().body == body
    feeder.join()


def test_the_end_of_the_main_process_is_noticed_with_work_left(ends: tuple[Channel, Inbox]) -> None:
    here, inbox = ends
    send(here, Tag.FILL, 1)
    send(here, Tag.FILL, 2)
    here.close()
    with pytest.raises(Orphaned):
        list(iter(inbox.take, None))


def test_waiting_for_work_and_for_space_and_working_are_told_apart(ends: tuple[Channel, Inbox]) -> None:
    here, inbox = ends
    gate, freed = threading.Event(), threading.Event()

    def answer() -> None:
        gate.wait()
        send(here, Tag.FILL)
        freed.wait()
        send(here, Tag.GRANT)

    sender = threading.Thread(target=answer)
    sender.start()
    before = inbox.spent
    gate.set()
    inbox.take()
    after_work = inbox.spent
    freed.set()
    inbox.take_grant()
    after_space = inbox.spent
    sender.join()
    assert before[1:] == (0.0, 0.0)
    assert after_work[1] > 0
    assert after_work[2] == 0
    assert after_space[1] == after_work[1]
    assert after_space[2] > 0
    assert after_space[0] >= after_work[0] >= before[0] >= 0

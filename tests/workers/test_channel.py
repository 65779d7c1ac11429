"""Messages in packets: whole, in order, of any length, and never waiting in a send."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.workers import channel as channels
from shmloader.workers.channel import Channel, pair
from shmloader.workers.protocol import HEAD, INLINE_BYTES, NO_LAYOUT, Flag, Message, Tag
from tests.programs import descriptors


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of one channel."""
    here, there = pair()
    other = Channel(there)
    yield here, other
    here.close()
    other.close()


def send(channel: Channel, batch: int, body: bytes = b"", fd: int = -1) -> None:
    """A message that is told by its number."""
    channel.send(Tag.FILLED, Flag.NONE, NO_LAYOUT, 0, batch, 0, 0, body, fd)


def receive_all(channel: Channel) -> list[Message]:
    """What has arrived."""
    found = []
    while (message := channel.receive()) is not None:
        found.append(message)
    return found


def exchange(sender: Channel, receiver: Channel) -> list[Message]:
    """Everything that the sender has queued, received."""
    found = receive_all(receiver)
    while sender.backlog:
        sender.flush()
        found += receive_all(receiver)
    return found


def file_with(content: bytes) -> int:
    """An anonymous file's descriptor."""
    fd = os.memfd_create("content")
    os.write(fd, content)
    return fd


def test_every_field_arrives_as_it_was_sent(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    here.send(
        Tag.GRANT, Flag.KEPT | Flag.DEFINE, 513, 2**32 - 1, 2**64 - 1, 2**63, 2**40, b"body", -1, (1.5, 0.25, 1e9)
    )
    assert there.receive() == Message(
        Tag.GRANT, Flag.KEPT | Flag.DEFINE, 513, 2**32 - 1, 2**64 - 1, 2**63, 2**40, 1.5, 0.25, 1e9, b"body", -1
    )


def test_an_empty_channel_says_none_and_does_not_wait(ends: tuple[Channel, Channel]) -> None:
    assert ends[0].receive() is None


@pytest.mark.parametrize("nbytes", [0, 1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 2 * INLINE_BYTES, 300_001])
def test_a_body_of_any_length_arrives_whole(ends: tuple[Channel, Channel], nbytes: int) -> None:
    body = os.urandom(nbytes)
    send(ends[0], 7, body)
    (message,) = exchange(*ends)
    assert message == Message(Tag.FILLED, Flag.NONE, NO_LAYOUT, batch=7, body=body)


@given(st.lists(st.integers(0, 5 * INLINE_BYTES) | st.integers(0, 64), max_size=30))
@settings(max_examples=40, deadline=None)
def test_messages_of_all_lengths_keep_their_order(lengths: list[int]) -> None:
    here, end = pair()
    there = Channel(end)
    bodies = [bytes([number]) * length for number, length in enumerate(lengths)]
    for number, body in enumerate(bodies):
        send(here, number, body)
    found = exchange(here, there)
    assert [(message.batch, message.body) for message in found] == list(enumerate(bodies))
    here.close()
    there.close()


def test_a_send_never_waits_and_what_does_not_fit_is_sent_later(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    for number in range(3000):
        send(here, number, b"x" * 1000)
    assert here.backlog
    assert [message.batch for message in exchange(here, there)] == list(range(3000))
    assert not here.backlog


def test_a_long_message_is_not_overtaken_by_a_short_one(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    send(here, 0, b"x" * 4_000_000)
    send(here, 1)
    assert here.backlog
    assert [message.batch for message in exchange(here, there)] == [0, 1]


def test_both_sides_may_send_more_than_fits_at_once(ends: tuple[Channel, Channel]) -> None:
    for channel in ends:
        for number in range(2000):
            send(channel, number, b"x" * 1000)
    found: list[list[int]] = [[], []]
    while any(channel.backlog for channel in ends) or [len(one) for one in found] != [2000, 2000]:
        for channel, seen in zip(ends, found, strict=True):
            channel.flush()
            seen += [message.batch for message in receive_all(channel)]
    assert found == [list(range(2000))] * 2


def test_waiting_for_room_is_possible_exactly_while_there_is_none(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    while not here.backlog:
        send(here, 0, b"x" * 10_000)
    writable = select.poll()
    writable.register(here.fileno(), select.POLLOUT)
    assert not writable.poll(0)
    receive_all(there)
    assert writable.poll(0)


@pytest.mark.parametrize("nbytes", [0, 100_000])
def test_a_file_comes_with_its_message(ends: tuple[Channel, Channel], nbytes: int) -> None:
    here, there = ends
    before = descriptors()
    there.expects_fd = True
    send(here, 0)
    send(here, 1, b"x" * nbytes, file_with(b"content"))
    plain, message = exchange(here, there)
    assert plain.fd == -1
    assert len(message.body) == nbytes
    assert os.pread(message.fd, 100, 0) == b"content"
    os.close(message.fd)
    assert descriptors() == before


def test_a_file_that_waits_for_room_comes_later(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    there.expects_fd = True
    before = descriptors()
    while not here.backlog:
        send(here, 0, b"x" * 10_000)
    send(here, 1, b"", file_with(b"content"))
    message = exchange(here, there)[-1]
    assert os.pread(message.fd, 100, 0) == b"content"
    os.close(message.fd)
    assert descriptors() == before


def test_closing_closes_the_files_that_were_never_sent(ends: tuple[Channel, Channel]) -> None:
    here, _ = ends
    while not here.backlog:
        send(here, 0, b"x" * 10_000)
    before = descriptors()
    send(here, 1, b"", file_with(b"content"))
    here.close()
    here.close()
    assert descriptors() == before - 1  # the channel's own
    assert here.fileno() == -1


def test_what_a_dead_peer_had_said_is_read_although_it_left_messages_unread(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    send(here, 0)  # never read: this is what makes the kernel report a reset, and before what was queued
    send(there, 1)
    send(there, 2, b"x" * 100_000)
    there.close()
    first, second = here.receive(), here.receive()
    assert first is not None
    assert second is not None
    assert (first.batch, second.batch, len(second.body)) == (1, 2, 100_000)
    with pytest.raises(EOFError):
        here.receive()


def test_a_message_that_was_cut_short_by_death_is_never_delivered(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    send(there, 1, b"x" * 8_000_000)
    assert there.backlog
    there.close()
    with pytest.raises(EOFError):
        receive_all(here)


def test_sending_to_a_dead_peer_says_so(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    there.close()
    with pytest.raises(EOFError):
        send(here, 0)


def test_sending_through_a_closed_channel_says_so(ends: tuple[Channel, Channel]) -> None:
    """The end is closed as soon as the peer's end is read; the peer's exit is confirmed later."""
    here, _ = ends
    here.close()
    with pytest.raises(EOFError):
        send(here, 0)


def test_a_number_used_again_does_not_reach_the_closed_channel(ends: tuple[Channel, Channel]) -> None:
    here, _ = ends
    number = here.fileno()
    here.close()
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert number in (one.fileno(), other.fileno())
    with pytest.raises(EOFError):
        send(here, 0)
    arrived = select.poll()
    for end in (one, other):
        arrived.register(end, select.POLLIN)
    assert not arrived.poll(0)
    one.close()
    other.close()


def test_a_forked_worker_closes_every_end_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [pair() for _ in range(3)]
    monkeypatch.setattr(channels, "_open", {channel for channel, _ in made})
    mine = made[1][1]
    channels.close_inherited(mine)
    assert all(channel.fileno() == -1 for channel, _ in made)
    assert mine.fileno() >= 0
    for _, there in made:
        there.close()


def test_every_packet_begins_with_its_tag(ends: tuple[Channel, Channel]) -> None:
    here, end = pair()
    send(here, 1, b"x" * (INLINE_BYTES + 1))
    tags = [end.recv(INLINE_BYTES + HEAD.size)[0] for _ in range(3)]
    assert tags == [Tag.FILLED, Tag.FRAGMENT, Tag.FRAGMENT]
    here.close()
    end.close()

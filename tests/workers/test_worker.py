"""The worker's body, called in this process: scripted messages go in, its answers are looked at."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _DatasetKind

from shmloader import DataLoader
from shmloader.memory import codec
from shmloader.memory.layout import Layout
from shmloader.memory.rebuild import decode
from shmloader.memory.segment import Segment
from shmloader.workers.channel import Channel, pair
from shmloader.workers.failure import unpack_failure
from shmloader.workers.inbox import Inbox, Orphaned, Stopped
from shmloader.workers.payload import Job
from shmloader.workers.protocol import INLINE_BYTES, NO_LAYOUT, Flag, Message, Tag
from shmloader.workers.worker import serve
from tests.datasets import Made
from tests.faulty import Numbers, Trap

KIB, MIB = 1 << 10, 1 << 20
RANGE = (4096, 64 * KIB)  # offset and size of the range that most fills name
BASE_SEED = 1000


@pytest.fixture(autouse=True)
def this_process_stays_itself() -> Iterator[None]:
    """The body takes its process over: thread count, generators, worker info."""
    threads, states = torch.get_num_threads(), (torch.get_rng_state(), random.getstate(), np.random.get_state())
    allocate = torch.UntypedStorage._new_shared
    yield
    assert torch.UntypedStorage._new_shared == allocate
    torch.set_num_threads(threads)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    torch_worker._worker_info = None


class Script:
    """Stands for inbox and channel: hands out scripted messages, or calls scripted functions, then says stop."""

    def __init__(self, steps: list[Any], grants: list[Message]) -> None:
        self.channel = self
        self.sent: list[Message] = []
        self._steps, self._grants = deque(steps), deque(grants)

    def take(self) -> Message:
        """The next scripted message."""
        while self._steps and callable(self._steps[0]):
            self._steps.popleft()()
        if not self._steps:
            raise Stopped
        return self._steps.popleft()

    def take_grant(self) -> Message:
        """The next scripted grant."""
        return self._grants.popleft()

    spent = (3.0, 2.0, 1.0)

    def send(self, *fields: Any) -> None:
        """Note what the worker says."""
        *head, body, fd, spent = fields
        self.sent.append(Message(*head, *spent, body, fd))


def job(dataset: Any, collate_fn: Callable[[Any], Any] = default_collate, **options: Any) -> Job:
    """A job like a loader's."""
    kind = _DatasetKind.Iterable if isinstance(dataset, IterableDataset) else _DatasetKind.Map
    defaults: dict[str, Any] = {"auto_collation": True, "drop_last": False, "worker_init_fn": None, "num_workers": 2}
    options = {**defaults, "base_seed": BASE_SEED, "seed_batches": False, **options}
    return Job(dataset_kind=kind, dataset=dataset, collate_fns=(collate_fn,), **options)


def fill(batch: int, indices: Any, at: tuple[int, int] = RANGE, epoch: int = 0) -> Message:
    """A Fill."""
    return Message(Tag.FILL, epoch=epoch, batch=batch, offset=at[0], size=at[1], body=codec.pack(indices))


def grant(batch: int, at: tuple[int, int] = (0, 0), flags: int = Flag.NONE) -> Message:
    """An answer to NeedSpace."""
    return Message(Tag.GRANT, flags, batch=batch, offset=at[0], size=at[1])


class Run:
    """One run of the body, and what it said after its Hello."""

    def __init__(self, the_job: Job, *steps: Any, grants: tuple[Message, ...] = ()) -> None:
        self.segment = Segment(MIB, lambda: 1 << 40)
        self.segment.reserve(0, MIB)
        script = Script(list(steps), list(grants))
        serve(1, the_job, script, self.segment)  # type: ignore[arg-type]
        hello, *self.said = script.sent
        assert hello.tag == Tag.HELLO
        self.known: dict[int, Layout] = {}
        self.values = b""

    def batch(self, message: Message, offset: int = RANGE[0]) -> Any:
        """The batch of a Filled, read from the range at ``offset``."""
        assert message.tag == Tag.FILLED, self.error(message)
        layout = self.layout(message, self.segment.map[offset:])
        return decode(layout, bytearray(self.segment.map[offset:]), 0, self.values)

    def layout(self, message: Message, memory: bytes) -> Layout:
        """What the main process makes of a Filled."""
        if message.layout in self.known and not message.flags & Flag.DEFINE:
            self.values = message.body
            return self.known[message.layout]
        layout = Layout.from_bytes(message.body)
        self.values = message.body[layout.head_bytes :]
        if message.flags & Flag.DEFINE:
            self.known[message.layout] = layout
        if message.flags & Flag.IN_RANGE:
            layout = Layout(memory[message.offset : message.offset + message.size], layout.spans, layout.plain)
        return layout

    def error(self, message: Message) -> BaseException | None:
        """The error of a Failed."""
        return unpack_failure(message.body) if message.tag == Tag.FAILED and message.body else None

    def tags(self) -> list[int]:
        """What it said, in short."""
        return [message.tag for message in self.said]


# -- batches ------------------------------------------------------------------------------------------------------


def test_a_batch_is_collated_inside_its_range() -> None:
    addresses: list[int] = []

    def collate(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        addresses.append(batch.data_ptr())
        return batch

    run = Run(job(Numbers(), collate), fill(3, [1, 2]))
    (answer,) = run.said
    assert (answer.tag, answer.epoch, answer.batch, answer.flags) == (Tag.FILLED, 0, 3, Flag.NONE)
    assert addresses == [run.segment.address + RANGE[0]]
    assert torch.equal(run.batch(answer), torch.tensor([[1] * 8, [2] * 8]))


def test_what_a_collate_function_allocates_elsewhere_is_copied_into_the_range() -> None:
    run = Run(job(Numbers(), lambda samples: torch.stack(samples)), fill(0, [1, 2]))
    assert torch.equal(run.batch(run.said[0]), torch.tensor([[1] * 8, [2] * 8]))


def test_without_a_range_the_worker_asks_and_moves_the_batch_into_the_grant() -> None:
    there = (128 * KIB, 64 * KIB)
    run = Run(job(Numbers()), fill(5, [1], (0, 0)), grants=(grant(5, there),))
    need, answer = run.said
    assert (need.tag, need.batch, need.size) == (Tag.NEED_SPACE, 5, 64)
    assert torch.equal(run.batch(answer, there[0]), torch.tensor([[1] * 8]))


def test_a_range_that_is_too_small_is_left_for_a_larger_one() -> None:
    there = (128 * KIB, 128 * KIB)
    small = (4096, 4096)
    run = Run(job(Numbers(width=1000)), fill(0, [1, 2], small), grants=(grant(0, there),))
    need, answer = run.said
    assert (need.tag, need.size) == (Tag.NEED_SPACE, 16_000)
    assert answer.flags & Flag.KEPT == 0
    assert torch.equal(run.batch(answer, there[0])[1], torch.full((1000,), 2))


def test_granted_nothing_the_batch_travels_in_a_file() -> None:
    run = Run(job(Numbers()), fill(0, [1, 2], (0, 0)), grants=(grant(0, flags=Flag.NOTHING),))
    answer = run.said[1]
    assert answer.flags & Flag.IN_FILE
    content = bytearray(os.pread(answer.fd, MIB, 0))
    os.close(answer.fd)
    assert torch.equal(decode(run.layout(answer, content), content), torch.tensor([[1] * 8, [2] * 8]))


def test_granted_a_drop_the_batch_is_forgotten() -> None:
    run = Run(job(Numbers()), fill(0, [1], (0, 0)), fill(1, [2]), grants=(grant(0, flags=Flag.DROP),))
    assert run.tags() == [Tag.NEED_SPACE, Tag.FAILED, Tag.FILLED]
    assert run.said[1].body == b""


def test_a_layout_is_announced_when_it_comes_again_and_is_a_number_from_then_on() -> None:
    run = Run(job(Numbers()), *(fill(index, [index]) for index in range(4)))
    assert [message.layout for message in run.said] == [NO_LAYOUT, 0, 0, 0]
    assert [bool(message.flags & Flag.DEFINE) for message in run.said] == [False, True, False, False]
    assert [bool(message.body) for message in run.said] == [True, True, False, False]
    assert run.batch(run.said[1]).shape == run.batch(run.said[3]).shape


def test_a_number_is_used_again_only_with_an_announcement() -> None:
    """More layouts than may be known at once, each coming twice, then all once more."""
    twice = [width for width in range(1, 81) for _ in range(2)] + list(range(1, 81))
    run = Run(job(Ragged()), *(fill(number, [width]) for number, width in enumerate(twice)))
    known: dict[int, int] = {}
    for width, message in zip(twice, run.said, strict=True):
        if message.flags & Flag.DEFINE:
            known[message.layout] = width
        if message.layout != NO_LAYOUT:
            assert known[message.layout] == width


def test_a_long_skeleton_travels_in_the_range() -> None:
    texts = ["ä" * 30 + str(number) for number in range(1000)]
    run = Run(job(texts, lambda samples: samples), fill(0, list(range(1000)), (4096, 128 * KIB)))
    (answer,) = run.said
    assert answer.flags & Flag.IN_RANGE
    assert len(answer.body) < INLINE_BYTES
    assert run.batch(answer) == texts


class Ragged(Dataset[torch.Tensor]):
    """Item i has i numbers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index,), index)


# -- references that the worker keeps -----------------------------------------------------------------------------


class Keeper:
    """A collate function that keeps what it returned."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        self.kept.append(batch)
        return batch


def test_a_kept_batch_is_reported_and_reported_again_when_it_is_let_go() -> None:
    keeper = Keeper()
    elsewhere = (256 * KIB, 64 * KIB)
    run = Run(job(Numbers(), keeper), fill(0, [1]), keeper.kept.clear, fill(1, [2], elsewhere))
    kept, after, let_go = run.said
    assert (kept.tag, kept.flags & Flag.KEPT) == (Tag.FILLED, Flag.KEPT)
    assert after.flags & Flag.KEPT == 0
    assert (let_go.tag, let_go.offset) == (Tag.LET_GO, RANGE[0])


def test_once_something_was_kept_batches_are_collated_outside_their_range() -> None:
    keeper = Keeper()
    run = Run(job(Numbers(), keeper), fill(0, [1]), fill(1, [2], (256 * KIB, 64 * KIB)))
    assert keeper.kept[1].data_ptr() != run.segment.address + 256 * KIB
    assert [message.flags & Flag.KEPT for message in run.said] == [Flag.KEPT, 0]
    assert torch.equal(keeper.kept[0], torch.tensor([[1] * 8]))
    keeper.kept.clear()


def test_a_batch_that_moved_to_a_larger_range_and_is_kept_in_the_first() -> None:
    keeper = Keeper()

    def collate(samples: list[Any]) -> Any:
        return [keeper(samples), torch.zeros(5000)]

    run = Run(job(Numbers(), collate), fill(0, [1], (4096, 4096)), grants=(grant(0, (128 * KIB, 64 * KIB)),))
    assert run.said[1].flags & Flag.KEPT
    keeper.kept.clear()


class Cache(Numbers):
    """Caches a collated batch inside ``__getitem__``."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: list[torch.Tensor] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.cache.append(default_collate([super().__getitem__(index)] * 2))
        return self.cache[-1][0]


def test_what_the_data_set_collates_for_itself_never_lies_in_the_range() -> None:
    cache = Cache()
    run = Run(job(cache), fill(0, [1]))
    begin = run.segment.address
    assert all(not begin <= batch.data_ptr() < begin + MIB for batch in cache.cache)
    assert run.said[0].flags & Flag.KEPT == 0


def test_an_error_in_the_middle_of_collating_does_not_count_as_a_kept_batch() -> None:
    """The error refers to its frames, and they to what was collated so far: it must be gone before the range is."""
    addresses: list[int] = []

    def collate(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        addresses.append(batch.data_ptr())
        if int(batch[0, 0]) == 1:
            raise ValueError("half-way")
        return batch

    run = Run(job(Numbers(), collate), fill(0, [1]), fill(1, [2]))
    assert run.tags() == [Tag.FAILED, Tag.FILLED]
    assert [message.flags & Flag.KEPT for message in run.said] == [0, 0]
    assert addresses == [run.segment.address + RANGE[0]] * 2, "the second batch is no longer collated in its range"


def test_a_batch_that_cannot_be_pickled_does_not_count_as_kept() -> None:
    def collate(samples: list[Any]) -> Any:
        return {"x": default_collate(samples), "f": lambda: None}

    run = Run(job(Numbers(), collate), fill(0, [1]))
    (answer,) = run.said
    assert answer.flags & Flag.KEPT == 0
    assert "batch['f'] cannot be sent to the main process" in str(run.error(answer))


# -- errors and ends ----------------------------------------------------------------------------------------------


def test_an_error_is_answered_in_torchs_words_and_work_goes_on() -> None:
    run = Run(job(Trap("raise", "fetch", at=1)), fill(0, [1]), fill(1, [2]))
    assert run.tags() == [Tag.FAILED, Tag.FILLED]
    error = run.error(run.said[0])
    assert isinstance(error, ValueError)
    assert str(error).startswith("Caught ValueError in DataLoader worker process 1.\nOriginal Traceback")


def test_an_error_at_the_start_answers_every_fill() -> None:
    trap = Trap("raise", "start")
    run = Run(job(trap, worker_init_fn=trap.start), fill(0, [1]), fill(1, [2]))
    assert run.tags() == [Tag.FAILED, Tag.FAILED]
    assert all("a broken sample" in str(run.error(message)) for message in run.said)


class Stream(IterableDataset[torch.Tensor]):
    """Yields 0, 1, 2."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(0), torch.tensor(1), torch.tensor(2)])


def test_an_iterable_data_set_ends_once_and_begins_again_with_the_next_epoch() -> None:
    fills = [fill(number, [0, 0]) for number in range(4)]
    again = fill(0, [0, 0], epoch=1)
    run = Run(job(Stream()), *fills, Message(Tag.RESUME, epoch=1), again)
    assert run.tags() == [Tag.FILLED, Tag.FILLED, Tag.EXHAUSTED, Tag.FILLED]
    assert run.said[3].epoch == 1
    assert run.batch(run.said[3]).tolist() == [0, 1]


def test_stop_iteration_from_the_collate_function_ends_an_iterable_data_set_without_a_kept_range() -> None:
    def collate(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return batch, next(iter([]))

    run = Run(job(Stream(), collate), fill(0, [0]), fill(1, [0]))
    assert run.tags() == [Tag.EXHAUSTED]
    assert run.said[0].flags & Flag.KEPT == 0


def test_an_iterable_data_set_that_ends_while_its_range_is_kept_says_so() -> None:
    keeper = Keeper()

    def collate(samples: list[Any]) -> Any:
        keeper(samples)
        raise StopIteration

    run = Run(job(Stream(), collate), fill(0, [0]), keeper.kept.clear, Message(Tag.RESUME, epoch=1))
    assert run.tags() == [Tag.EXHAUSTED, Tag.LET_GO]
    assert run.said[0].flags & Flag.KEPT


# -- the worker's world -------------------------------------------------------------------------------------------


class World(Dataset[Any]):
    """Tells what a sample sees."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return info.id, info.num_workers, info.seed, torch.get_num_threads(), torch.rand(1).item()


def test_a_sample_sees_torchs_worker_info_seed_and_one_thread() -> None:
    run = Run(job(World(), lambda samples: samples), fill(0, [0]))
    ((worker_id, count, seed, threads, drawn),) = run.batch(run.said[0])
    torch.manual_seed(BASE_SEED + 1)
    assert (worker_id, count, seed, threads, drawn) == (1, 2, BASE_SEED + 1, 1, torch.rand(1).item())


def test_hello_comes_after_the_init_function_and_before_the_first_answer() -> None:
    order: list[str] = []
    script = Script([lambda: order.append("fill")], [])
    send = script.send

    def noted(*fields: Any) -> None:
        order.append("hello" if fields[0] == Tag.HELLO else "other")
        send(*fields)

    script.send = noted  # type: ignore[method-assign]
    segment = Segment(MIB, lambda: 1 << 40)
    serve(0, job(Numbers(), worker_init_fn=lambda _: order.append("init")), script, segment)  # type: ignore[arg-type]
    assert order == ["init", "hello", "fill"]


# -- the inbox ----------------------------------------------------------------------------------------------------


@pytest.fixture
def line() -> Iterator[tuple[Channel, Inbox]]:
    """The main process's end, and the worker's inbox."""
    main, there = pair()
    inbox = Inbox(Channel(there))
    yield main, inbox
    main.close()
    inbox.channel.close()


def send(channel: Channel, tag: int, batch: int = 0) -> None:
    """A message that is told by its number."""
    channel.send(tag, Flag.NONE, NO_LAYOUT, 0, batch, 0, 0)


def test_fills_that_arrive_while_a_grant_is_awaited_keep_their_order(line: tuple[Channel, Inbox]) -> None:
    main, inbox = line
    for batch in (1, 2):
        send(main, Tag.FILL, batch)
    send(main, Tag.GRANT, 7)
    send(main, Tag.FILL, 3)
    assert inbox.take_grant().batch == 7
    assert [inbox.take().batch for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("waiting", ["take", "take_grant"])
def test_a_stop_is_obeyed_while_waiting_even_behind_fills(line: tuple[Channel, Inbox], waiting: str) -> None:
    main, inbox = line
    send(main, Tag.FILL, 1)
    send(main, Tag.STOP)
    with pytest.raises(Stopped):
        getattr(inbox, waiting)()


@pytest.mark.parametrize("waiting", ["take", "take_grant"])
def test_the_end_of_the_main_process_is_seen_on_the_channel(line: tuple[Channel, Inbox], waiting: str) -> None:
    main, inbox = line
    main.close()
    with pytest.raises(Orphaned):
        getattr(inbox, waiting)()


@pytest.mark.parametrize("waiting", ["take", "take_grant"])
def test_the_end_of_the_main_process_is_seen_though_others_hold_its_end(waiting: str) -> None:
    """The watched descriptor is what becomes readable when the main process ends."""
    main, there = pair()
    read_end, write_end = os.pipe()
    inbox = Inbox(Channel(there), watch=read_end)
    os.close(write_end)
    with pytest.raises(Orphaned):
        getattr(inbox, waiting)()
    os.close(read_end)
    main.close()
    inbox.channel.close()


def test_a_worker_whose_answers_find_no_room_keeps_reading(line: tuple[Channel, Inbox]) -> None:
    main, inbox = line
    while not inbox.channel.backlog:
        inbox.channel.send(Tag.FAILED, Flag.NONE, NO_LAYOUT, 0, 0, 0, 0, b"x" * 10_000)
    send(main, Tag.FILL, 1)
    assert inbox.take().batch == 1
    while main.receive() is not None:
        pass
    send(main, Tag.FILL, 2)
    assert inbox.take().batch == 2
    assert not inbox.channel.backlog


# -- its place among processes ------------------------------------------------------------------------------------


def policy(_: int) -> int:
    """A sample: the scheduling policy of the process that makes it."""
    return os.sched_getscheduler(0)


def idle_policy(_: int) -> None:
    """A worker_init_fn that knows better."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def test_a_worker_does_not_interrupt_its_loader_unless_the_user_knows_better() -> None:
    mine = os.sched_getscheduler(0)
    assert list(DataLoader(Made(1, policy), None, num_workers=1)) == [os.SCHED_BATCH]
    assert list(DataLoader(Made(1, policy), None, num_workers=1, worker_init_fn=idle_policy)) == [os.SCHED_IDLE]
    assert os.sched_getscheduler(0) == mine

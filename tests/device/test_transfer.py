"""Batches on their way to a device whose copies complete late and out of order."""

from __future__ import annotations

import gc
import mmap
import os
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.device import transfer as module
from shmloader.device.nest import leaves
from shmloader.device.staging import RING
from shmloader.device.transfer import SMALL_BYTES, Flight, Transfer
from shmloader.errors import PlatformWarning
from shmloader.memory.codec import encode, place
from shmloader.memory.lease import lease
from shmloader.memory.rebuild import decode
from shmloader.memory.segment import address_of
from tests.device.batches import ODD, Broken, Encoding, Graph, Stuck, packed, plain_nests
from tests.equal import assert_same
from tests.fakes import FakeAccelerator

LARGE = SMALL_BYTES  # bytes of the smallest part that crosses by itself
SEEDS = range(5)
quiet = pytest.mark.filterwarnings("ignore:.*[Ss]parse", "ignore:.*nested tensors", "ignore:.*quantize")


class Slot:
    """A page-locked slot, which is filled with something else as soon as nothing refers to it any more."""

    def __init__(self, fake: FakeAccelerator, nbytes: int = 1 << 20, locked: bool = True) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.nbytes, self.address = nbytes, address_of(self.map)
        self._returned: deque[Any] = deque()
        if locked:
            fake.runtime.register(self.address, nbytes)

    def lend(self, batch: Any) -> Any:
        """The batch, built in the slot."""
        encoded = encode(batch)
        offsets = place(encoded, self.address, self.nbytes)
        assert offsets is not None
        held = lease(self.map, 0, self.nbytes, self, self._returned)
        return decode(encoded.layout(offsets), held, 0, encoded.values)

    @property
    def came_back(self) -> bool:
        """Whether it has been returned, and thereby been filled with something else."""
        if self._returned:
            self.map[:] = b"\xdb" * self.nbytes
        return bool(self._returned)


@pytest.fixture(autouse=True)
def under_way(monkeypatch: pytest.MonkeyPatch) -> set[Flight]:
    """The flights of this test that are not through."""
    flights: set[Flight] = set()
    monkeypatch.setattr(module, "_under_way", flights)
    return flights


def transfer_to(fake: FakeAccelerator) -> Transfer:
    return Transfer(fake, fake.runtime.covers, [])


def carry(transfer: Transfer, batch: Any) -> Any:
    """What the current stream finds when it comes to the batch."""
    arrived = transfer.arrive(transfer.send(batch))
    transfer.accelerator.synchronize()  # type: ignore[attr-defined]
    return arrived


def complete_copies(transfer: Transfer, fake: FakeAccelerator) -> None:
    """Complete the work of the side stream, and none of the consumer's."""
    fake.complete(fake.record(transfer._stream))


def numbers(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.int64)


# -- the same batch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["by hand", "late"])
@pytest.mark.parametrize("seed", SEEDS)
def test_batches_arrive_as_they_were_in_the_order_in_which_they_were_sent(seed: int, late: bool) -> None:
    with FakeAccelerator(seed, late) as fake:
        transfer = transfer_to(fake)
        sent = [{"x": numbers(20_000, n), "y": [numbers(3, n), n]} for n in range(8)]
        flights = deque(transfer.send(batch) for batch in sent[:2])
        for n, batch in enumerate(sent):
            arrived = transfer.arrive(flights.popleft())
            if n + 2 < len(sent):
                flights.append(transfer.send(sent[n + 2]))
            fake.synchronize()
            assert_same(arrived, batch, moved=True)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(plain_nests(), min_size=1, max_size=4), st.integers(0, 99))
def test_any_batches_arrive_as_they_were_whatever_completes_when(sent: list[Any], seed: int) -> None:
    rng = random.Random(seed)
    with FakeAccelerator(seed) as fake:
        transfer = transfer_to(fake)
        flights: deque[tuple[Any, Flight]] = deque()
        for batch in sent:
            flights.append((batch, transfer.send(batch)))
            for _ in range(rng.randrange(4)):
                fake.step()
            if rng.random() < 0.5:
                transfer.reclaim()
            while flights and rng.random() < 0.4:
                arrive_and_compare(transfer, fake, *flights.popleft())
        for batch, flight in flights:
            arrive_and_compare(transfer, fake, batch, flight)
        transfer.finish()
        assert not module._under_way & {flight for _, flight in flights}


def arrive_and_compare(transfer: Transfer, fake: FakeAccelerator, batch: Any, flight: Flight) -> None:
    arrived = transfer.arrive(flight)
    fake.synchronize()
    assert_same(arrived, batch, moved=True)


def test_views_of_one_storage_stay_views_of_one_and_are_each_their_own() -> None:
    with FakeAccelerator() as fake:
        x = torch.zeros(4, 6)
        x, row, columns = carry(transfer_to(fake), [x, x[1], x.t()[2:]])
        versions = [view._version for view in (x, row, columns)]
        row += 1
        assert [view._version for view in (x, row, columns)] == [versions[0], versions[1] + 1, versions[2]]
        assert float(x[1].sum()) == float(x.sum()) == 6.0
        assert float(columns.sum()) == 4.0
        assert columns.stride() == (1, 6)
        for view in (x, row, columns):
            assert view._base is None
            view.detach_()


def test_views_of_one_storage_with_other_dtypes_begin_where_they_began() -> None:
    with FakeAccelerator() as fake:
        x = numbers(10)
        batch = [x.view(torch.uint8)[3:11], x[1:], numbers(3)]
        assert_same(carry(transfer_to(fake), batch), batch, moved=True)


def test_fields_that_crossed_together_can_be_changed_one_by_one() -> None:
    """Backward refuses a tensor whose version has moved on, so a change of one field must not count for another."""
    with FakeAccelerator() as fake:
        x, y = carry(transfer_to(fake), [torch.ones(3), torch.ones(3)])
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * x).sum()
        y += 1
        loss.backward()
        assert torch.equal(torch.as_tensor(weight.grad), torch.ones(3))


def test_a_leaf_that_requires_grad_is_one_on_the_device() -> None:
    with FakeAccelerator() as fake:
        (x,) = carry(transfer_to(fake), [torch.ones(3, requires_grad=True)])
        assert x.requires_grad
        assert x.is_leaf
        x.sum().backward()
        assert x.grad is not None


def test_two_storages_on_one_piece_of_memory_arrive_both() -> None:
    with FakeAccelerator() as fake:
        memory = bytearray(range(200))
        short = torch.frombuffer(memory, dtype=torch.uint8, count=8)
        long = torch.frombuffer(memory, dtype=torch.uint8)
        arrived = carry(transfer_to(fake), [short, long])
        assert [x.tolist() for x in arrived] == [short.tolist(), long.tolist()]


@pytest.mark.parametrize(
    "batch",
    [
        [],
        {},
        None,
        "text",
        torch.empty(0),
        {"x": torch.empty(2, 0, 3, dtype=torch.int16), "y": torch.tensor(7)},
        [torch.tensor(1.5, dtype=torch.float64), torch.tensor(True)],
        [numbers(6)[6:], numbers(6)[5:]],
        torch.ones(1).expand(3, 4),
    ],
    ids=repr,
)
def test_batches_with_little_in_them_arrive(batch: Any) -> None:
    with FakeAccelerator() as fake:
        assert_same(carry(transfer_to(fake), batch), batch, moved=True)


@quiet
@pytest.mark.parametrize("name", ODD)
def test_other_kinds_of_tensors_move_themselves(name: str) -> None:
    with FakeAccelerator() as fake:
        odd = ODD[name](torch.arange(6.0))
        arrived, plain = carry(transfer_to(fake), [odd, torch.ones(2)])
        assert plain.tolist() == [1.0, 1.0]
        assert arrived is not odd
        if odd.is_nested:
            assert [part.tolist() for part in arrived.unbind()] == [part.tolist() for part in odd.unbind()]
        else:
            assert (arrived.dtype, arrived.layout, arrived.shape) == (odd.dtype, odd.layout, odd.shape)
            dense = torch.dequantize if odd.is_quantized else torch.Tensor.to_dense
            assert_same(dense(arrived.detach()).tolist(), dense(odd.detach()).tolist())


def test_objects_move_themselves_each_by_its_own_means() -> None:
    with FakeAccelerator() as fake:
        x, stuck, sequence = torch.arange(4.0), Stuck(torch.ones(2)), packed()
        graph, encoding, still, arrived = carry(transfer_to(fake), [Graph(x), Encoding(x=x), stuck, sequence])
        assert type(graph) is Graph
        assert type(encoding) is Encoding
        assert still is stuck
        for moved in (graph.x, encoding["x"]):
            assert moved.tolist() == x.tolist()
            assert moved.data_ptr() != x.data_ptr()
        assert arrived.data.tolist() == sequence.data.tolist()
        assert arrived.batch_sizes.tolist() == sequence.batch_sizes.tolist()


def test_what_stays_on_the_cpu_keeps_its_slot() -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake), transfer_to(fake)
        arrived = carry(transfer, slot.lend([torch.ones(3), Stuck(torch.ones(3))]))
        fake.run_all()
        transfer.reclaim()
        assert not slot.came_back
        assert float(arrived[1].x.sum()) == 3.0
        del arrived
        assert slot.came_back


def test_batches_taken_in_inference_mode_can_be_trained_on() -> None:
    with FakeAccelerator() as fake:
        with torch.inference_mode():
            x, graph = carry(transfer_to(fake), [torch.ones(3), Graph(torch.ones(3))])
            plain = carry(transfer_to(fake), [torch.ones(3)])
        assert not any(found.is_inference() for found in (x, graph.x, *plain))


# -- how it crosses ----------------------------------------------------------------------------------------------------


def test_small_parts_cross_in_one_copy_and_large_ones_each_in_its_own() -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake), transfer_to(fake)
        batch = [numbers(5, n) for n in range(7)] + [torch.zeros(LARGE, dtype=torch.uint8) for _ in range(2)]
        assert_same(carry(transfer, slot.lend(batch)), batch, moved=True)
        assert sorted(copied.nbytes >= LARGE for copied in fake.copies) == [False, True, True]
        assert all(copied.locked for copied in fake.copies)


def test_a_part_that_is_alone_crosses_from_where_it_lies() -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake), transfer_to(fake)
        carry(transfer, slot.lend({"x": numbers(4), "n": 3}))
        (copied,) = fake.copies
        assert slot.address <= copied.address < slot.address + slot.nbytes
        assert transfer.staging.nbytes == 0


@pytest.mark.parametrize("nbytes", [100, LARGE, 5 * LARGE])
def test_nothing_crosses_from_memory_that_is_not_page_locked(nbytes: int) -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake, locked=False), transfer_to(fake)
        fake.runtime.register(slot.address, mmap.PAGESIZE)  # only its beginning
        batch = [torch.full((nbytes,), 3, dtype=torch.uint8), torch.full((LARGE,), 4, dtype=torch.uint8)]
        assert_same(carry(transfer, slot.lend(batch)), batch, moved=True)
        assert all(copied.locked for copied in fake.copies)


def test_only_what_is_seen_of_a_storage_crosses() -> None:
    with FakeAccelerator() as fake:
        carry(transfer_to(fake), [numbers(100_000)[50_000:50_010], numbers(100_000)[7::10_000][:1]])
        assert sum(copied.nbytes for copied in fake.copies) < 1000


@pytest.mark.parametrize("count", [1, 2, 5])
def test_without_page_locked_memory_there_is_one_warning_and_right_batches(count: int) -> None:
    with FakeAccelerator() as fake:
        fake.refuses_memory = True
        notices: list[Warning] = []
        transfer = Transfer(fake, fake.runtime.covers, notices)
        batch = [numbers(count + 10, 100 * n) for n in range(count)] + [numbers(20_000)]
        arrived = [carry(transfer, batch) for _ in range(3)]
        assert [type(notice) for notice in notices] == [PlatformWarning]
        for each in arrived:
            assert_same(each, batch, moved=True)


def test_staging_memory_is_not_filled_again_before_it_has_been_read() -> None:
    with FakeAccelerator() as fake:
        transfer = transfer_to(fake)
        sent = [[numbers(150_000, n), numbers(5, n), numbers(6, n)] for n in range(4 * RING)]
        flights = [transfer.send(batch) for batch in sent]
        for flight, batch in zip(flights, sent):
            arrive_and_compare(transfer, fake, batch, flight)


def test_one_large_part_is_put_into_staging_memory_while_the_one_before_is_read_and_no_more() -> None:
    with FakeAccelerator() as fake:
        transfer = transfer_to(fake)
        for n in range(3 * RING):
            transfer.drop(transfer.send(numbers(200_000, n)))
        assert len(fake.locked_blocks) == RING


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_in_a_steady_state_no_page_locked_memory_is_taken(ahead: int) -> None:
    with FakeAccelerator() as fake:
        transfer = transfer_to(fake)
        flights: deque[Flight] = deque()
        counts = []
        for n in range(20):
            flights.append(transfer.send([numbers(200_000, n), numbers(5), numbers(6)]))
            if len(flights) > ahead:
                transfer.arrive(flights.popleft())
                fake.synchronize()
            counts.append(len(fake.locked_blocks))
        assert counts[-1] == counts[5]


def test_one_batch_may_need_more_staging_memory_than_the_ring_has() -> None:
    with FakeAccelerator() as fake:
        batch = [numbers(150_000, n) for n in range(3 * RING)]
        assert_same(carry(transfer_to(fake), batch), batch, moved=True)


# -- nothing is let go too early ---------------------------------------------------------------------------------------


def drop_at_once(transfer: Transfer, batch: Any) -> None:
    transfer.drop(transfer.send(batch))


def arrive_and_drop(transfer: Transfer, batch: Any) -> None:
    transfer.arrive(transfer.send(batch))


def fail_at_the_second_copy(transfer: Transfer, batch: Any) -> None:
    fake: Any = transfer.accelerator
    fake.fails.add(len(fake.copies) + 2)
    with pytest.raises(RuntimeError, match="the device fails"):
        transfer.send(batch)


@contextmanager
def failing_records(fake: Any) -> Iterator[None]:
    """Inside, the device fails when it is asked for an event."""

    def refuse(stream: Any) -> Any:
        raise RuntimeError("the device fails")

    fake.record, record = refuse, fake.record
    with pytest.raises(RuntimeError, match="the device fails"):
        yield
    fake.record = record


def fail_at_the_record(transfer: Transfer, batch: Any) -> None:
    with failing_records(transfer.accelerator):
        transfer.send(batch)


def fail_at_the_last_record(transfer: Transfer, batch: Any) -> None:
    flight = transfer.send(batch)
    complete_copies(transfer, transfer.accelerator)  # type: ignore[arg-type]
    with failing_records(transfer.accelerator):
        transfer.arrive(flight)
    transfer.drop(flight)
    transfer.reclaim()


def let_it_go(transfer: Transfer, batch: Any) -> None:
    transfer.send(batch)


def two_parts(slot: Slot) -> Any:
    return slot.lend([torch.ones(LARGE, dtype=torch.uint8), torch.ones(2 * LARGE, dtype=torch.uint8)])


def with_a_graph(slot: Slot) -> Any:
    return slot.lend([torch.ones(LARGE, dtype=torch.uint8), torch.ones(LARGE), Graph(torch.ones(LARGE))])


@pytest.mark.parametrize("make", [two_parts, with_a_graph])
@pytest.mark.parametrize("way", [drop_at_once, arrive_and_drop, fail_at_the_second_copy])
def test_a_slot_comes_back_when_the_device_has_read_it_and_not_before(way: Any, make: Any) -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake), transfer_to(fake)
        way(transfer, make(slot))
        assert not slot.came_back
        transfer.reclaim()
        assert not slot.came_back
        fake.run_all()
        transfer.reclaim()
        assert slot.came_back


@pytest.mark.parametrize("make", [two_parts, with_a_graph])
@pytest.mark.parametrize("way", [drop_at_once, arrive_and_drop, fail_at_the_second_copy, fail_at_the_record, let_it_go])
def test_a_slot_is_kept_while_the_device_reads_even_if_nobody_asks_for_anything_again(way: Any, make: Any) -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake), transfer_to(fake)
        way(transfer, make(slot))
        del transfer
        gc.collect()
        assert not slot.came_back
        fake.run_all()


def test_a_slot_is_kept_for_good_if_the_device_fails_while_a_part_moves_itself() -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake), transfer_to(fake)
        fail_at_the_last_record(transfer, with_a_graph(slot))
        assert not slot.came_back
        fake.run_all()


def test_a_slot_is_kept_until_what_moves_itself_has_been_read_as_well() -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake), transfer_to(fake)
        flight = transfer.send(with_a_graph(slot))
        fake.run_all()
        transfer.reclaim()
        assert not slot.came_back  # the graph has not even begun
        arrived = transfer.arrive(flight)
        complete_copies(transfer, fake)
        transfer.reclaim()
        assert not slot.came_back
        fake.run_all()
        transfer.reclaim()
        assert slot.came_back
        assert float(arrived[2].x.sum()) == LARGE


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize("seed", SEEDS)
def test_slots_in_turn_are_never_filled_while_they_are_read(seed: int, keep: bool) -> None:
    with FakeAccelerator(seed) as fake:
        transfer, slots = transfer_to(fake), [Slot(fake) for _ in range(3)]
        kept, readings = [], []
        for n in range(30):
            slot = slots[n % 3]
            while n >= 3 and not slot.came_back:
                assert transfer.settle()
            slot._returned.clear()
            arrived = transfer.arrive(transfer.send(slot.lend([numbers(20_000, n), numbers(4, n)])))
            readings.append((n, fake.read(arrived[0]), fake.read(arrived[1])))
            if keep:
                kept.append(arrived)
            del arrived
            fake.step()
        fake.run_all()
        for n, large, small in readings:
            assert torch.equal(large.value, numbers(20_000, n))
            assert torch.equal(small.value, numbers(4, n))


@pytest.mark.parametrize("first", ["copies", "batch", "consumer"])
def test_exposed_is_what_the_consumers_stream_waits_for_copies(first: str) -> None:
    with FakeAccelerator() as fake:
        transfer = transfer_to(fake)
        flight = transfer.send([numbers(20_000), numbers(30_000)])
        if first == "copies":
            complete_copies(transfer, fake)
        transfer.arrive(flight)
        if first == "batch":  # it was asked for, but the stream has other things to do
            complete_copies(transfer, fake)
        if flight.awaited is not None and first == "consumer":
            fake.complete(flight.awaited[0])  # type: ignore[arg-type]
            assert len(fake.copies) == 2
            complete_copies(transfer, fake)
        transfer.reclaim()
        exposed_s = transfer.take_exposed_s()
        assert exposed_s == (0.003 if first == "consumer" else 0)  # two copies, and the event behind them
        fake.run_all()
        transfer.reclaim()
        assert transfer.take_exposed_s() == 0


def test_a_dropped_batchs_memory_is_not_given_out_while_the_step_still_reads_it() -> None:
    with FakeAccelerator() as fake:
        transfer = transfer_to(fake)
        arrived = transfer.arrive(transfer.send([numbers(20_000), numbers(5), numbers(6)]))
        readings = [fake.read(x) for x in arrived]
        del arrived
        complete_copies(transfer, fake)
        transfer.reclaim()
        complete_copies(transfer, fake)  # among them what is written where the batch was
        fake.run_all()
        assert [reading.value.tolist() for reading in readings] == [[*range(20_000)], [*range(5)], [*range(6)]]


def test_a_batch_may_arrive_in_a_stream_of_the_callers() -> None:
    with FakeAccelerator() as fake:
        transfer, mine = transfer_to(fake), fake.new_stream()
        flight = transfer.send([numbers(20_000), Graph(numbers(7))])
        with fake.on(mine):
            x, graph = transfer.arrive(flight)
            assert fake.fetch(x).tolist() == [*range(20_000)]
            assert fake.fetch(graph.x).tolist() == [*range(7)]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_what_fails_to_move_once_can_be_tried_again() -> None:
    with FakeAccelerator() as fake:
        transfer = transfer_to(fake)
        flight = transfer.send([torch.ones(2), Broken(torch.ones(3), 1)])
        with pytest.raises(ValueError, match="not now"):
            transfer.arrive(flight)
        x, moved = transfer.arrive(flight)
        fake.synchronize()
        assert (x.tolist(), moved.tolist()) == ([1.0] * 2, [1.0] * 3)


def test_a_batch_that_never_moves_does_not_hold_up_those_behind_it() -> None:
    with FakeAccelerator() as fake:
        slots, transfer = [Slot(fake), Slot(fake)], transfer_to(fake)
        broken, sound = (transfer.send(slot.lend([torch.ones(LARGE), Broken(torch.ones(1), 9)])) for slot in slots)
        with pytest.raises(ValueError, match="not now"):
            transfer.arrive(broken)
        transfer.drop(broken)
        transfer.drop(sound)
        fake.run_all()
        transfer.reclaim()
        del broken, sound
        assert all(slot.came_back for slot in slots)


def test_nothing_is_asked_of_the_device_while_a_graph_is_captured() -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake), transfer_to(fake)
        flight, other = transfer.send(slot.lend(numbers(5))), transfer.send(numbers(6))
        fake.captures = True
        with pytest.raises(RuntimeError, match="captured"):
            transfer.send(numbers(5))
        with pytest.raises(RuntimeError, match="captured"):
            transfer.arrive(flight)
        transfer.reclaim()
        assert not transfer.settle()
        transfer.drop(other)
        fake.captures = False
        arrived = transfer.arrive(flight)
        assert fake.fetch(arrived).tolist() == [*range(5)]


def test_an_end_during_a_capture_lets_nothing_go() -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake), transfer_to(fake)
        transfer.send(slot.lend(numbers(5)))
        fake.captures = True
        transfer.finish()
        del transfer
        assert not slot.came_back
        fake.captures = False
        fake.run_all()


def test_finish_waits_for_what_is_read_and_lets_everything_go(under_way: set[Flight]) -> None:
    with FakeAccelerator() as fake:
        slots, transfer = [Slot(fake) for _ in range(3)], transfer_to(fake)
        transfer.send(two_parts(slots[0]))
        transfer.send(with_a_graph(slots[1]))
        transfer.arrive(transfer.send(with_a_graph(slots[2])))
        transfer.finish()
        assert all(slot.came_back for slot in slots)
        assert not under_way
        transfer.finish()


def test_finish_lets_nothing_go_that_a_device_out_of_order_may_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake), transfer_to(fake)
        transfer.send(two_parts(slot))

        def fail(event: Any) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(fake, "complete", fail)
        transfer.finish()
        assert not slot.came_back


def test_a_forked_child_leaves_the_device_alone() -> None:
    with FakeAccelerator() as fake:
        slot, transfer = Slot(fake), transfer_to(fake)
        flight = transfer.send(slot.lend(numbers(5)))
        data = flight.data
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                transfer.finish()
                transfer.reclaim()
                if flight.data is data and not transfer.settle() and not slot.came_back:
                    status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert fake.fetch(transfer.arrive(flight)).tolist() == [*range(5)]


def test_all_of_a_batchs_device_memory_is_the_consumers_alone() -> None:
    with FakeAccelerator() as fake:
        transfer = transfer_to(fake)
        first = carry(transfer, [numbers(5), numbers(20_000)])
        second = carry(transfer, [numbers(5), numbers(20_000)])
        pointers = {x.untyped_storage().data_ptr() for x in leaves([first, second])}
        assert len(pointers) == 4
        for x in leaves(first):
            x.zero_()
        assert second[1].tolist() == [*range(20_000)]

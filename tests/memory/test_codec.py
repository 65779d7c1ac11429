"""Batches to bytes and back: what arrives is what was sent, on memory of its own."""

from __future__ import annotations

import ctypes
import mmap
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.memory.codec import (
    ALIGN_BYTES,
    MOST_VALUE_BYTES,
    dismantle,
    encode,
    join,
    need,
    pack,
    pieces,
    place,
    unpack,
)
from shmloader.memory.layout import MOST_LAYOUTS, Interner, Layout
from shmloader.memory.locate import locate
from shmloader.memory.rebuild import decode
from shmloader.memory.segment import address_of
from tests.equal import assert_same
from tests.nests import (
    DTYPES,
    SHAPES,
    Point,
    Record,
    Sample,
    Tagged,
    batches,
    plain_batches,
    random_tensor,
    tagged,
    tensors,
)

SLOT_BYTES = 1 << 20


class Slot:
    """A range of memory as a slot is: page-aligned, and kept alive by what is built on it."""

    def __init__(self, nbytes: int = SLOT_BYTES) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.address = address_of(self.map)
        self.nbytes = nbytes
        self.layout: Layout | None = None
        self.values = b""

    def carry(self, batch: Any) -> Any:
        """What arrives when ``batch`` is sent through this slot: the layout crosses as bytes, as in a message."""
        encoded = encode(batch)
        offsets = place(encoded, self.address, self.nbytes)
        assert offsets is not None
        self.layout = Layout.from_bytes(encoded.layout(offsets).to_bytes())
        self.values = encoded.values
        return self.again()

    def again(self) -> Any:
        """Another batch on the same bytes."""
        assert self.layout is not None
        return decode(self.layout, (ctypes.c_char * self.nbytes).from_buffer(self.map), 0, self.values)


@pytest.fixture
def slot() -> Slot:
    return Slot()


def tensors_in(nest: Any) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict):
        yield from (tensor for value in nest.values() for tensor in tensors_in(value))
    elif isinstance(nest, (list, tuple)):
        yield from (tensor for value in nest for tensor in tensors_in(value))
    elif hasattr(nest, "__dict__"):
        yield from tensors_in(vars(nest))


def visible_bytes(tensor: torch.Tensor) -> int:
    """From the first byte that a tensor sees to behind the last."""
    if not tensor.numel():
        return 0
    return (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()


# -- round trips ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=75)
@given(batches())
def test_a_nest_arrives_through_a_slot_and_through_packed_bytes_as_it_was_sent(batch: Any) -> None:
    assert_same(Slot().carry(batch), batch)
    assert_same(unpack(pack(batch)), batch)


@pytest.mark.slow
@settings(max_examples=100)
@given(plain_batches())
def test_batches_that_look_alike_arrive_as_they_were_sent_whatever_is_remembered_of_earlier_ones(sent: Any) -> None:
    known: dict[Any, Layout] = {}
    for batch in sent * 3:
        slot, encoded = Slot(4096), encode(batch)
        offsets = place(encoded, slot.address, slot.nbytes)
        assert offsets is not None
        layout = known.setdefault(encoded.key(offsets), encoded.layout(offsets))
        assert layout.to_bytes() == encoded.layout(offsets).to_bytes()
        assert_same(decode(layout, slot.map, 0, encoded.values), batch)


@settings(max_examples=40)
@given(st.lists(tensors, max_size=6))
def test_pieces_join_again_on_the_buffer_itself(batch: list[torch.Tensor]) -> None:
    run = bytearray(b"".join(pieces(dismantle(batch))) + b"what lies behind is ignored")
    arrived = join(run)
    assert_same(arrived, batch)
    for tensor in arrived:
        assert not tensor.numel() or 0 <= tensor.data_ptr() - address_of(run) < len(run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_has_a_storage_of_its_own_of_exactly_its_bytes_and_aligned(slot: Slot, dtype: torch.dtype) -> None:
    sent = [random_tensor(dtype, shape, seed) for seed, shape in enumerate(SHAPES)]
    arrived = slot.carry(sent)
    assert_same(arrived, sent)
    for tensor in arrived:
        assert tensor._base is None
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize
        assert tensor.data_ptr() % ALIGN_BYTES == 0
    full = [tensor for tensor in arrived if tensor.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in full}) == len(full)


@settings(max_examples=60)
@given(tensors.flatmap(lambda tensor: st.sampled_from([tensor.expand(2, *tensor.shape), tensor[..., None, None].mT])))
def test_a_tensor_with_strides_of_its_own_has_no_base_and_no_more_storage_than_it_sees(tensor: torch.Tensor) -> None:
    arrived = Slot().carry(tensor)
    assert_same(arrived, tensor)
    assert arrived._base is None
    assert arrived.storage_offset() == 0
    assert arrived.untyped_storage().nbytes() == visible_bytes(tensor)


@pytest.mark.parametrize(
    "batch",
    [
        [2**64, -(2**200), 0, True, None, ..., "\ud800"[:0], b"", bytearray(b"x"), 1.5, 1j],
        [float("nan"), float("-inf"), -0.0],
        [{1, 2}, frozenset({"a"}), range(3), slice(1, 2), np.float32(1.5), np.datetime64("2020-01-01", "s")],
        [],
        (),
        {},
        None,
        ["ä" * 100_000, b"y" * 300_000],
    ],
)
def test_plain_values_arrive_with_their_types(slot: Slot, batch: Any) -> None:
    assert repr(slot.carry(batch)) == repr(batch)
    assert repr(unpack(pack(batch))) == repr(batch)


@pytest.mark.parametrize(
    "indices",
    [[0, 1, 2], [-1, 2**63 - 1], [2**63], [True, False], [0, True], [np.int64(3)], [0, 1.0], (0, 1), [], 5, ["a", 0]],
)
def test_indices_arrive_with_exactly_their_types(indices: Any) -> None:
    arrived = unpack(pack(indices))
    assert arrived == indices
    assert type(arrived) is type(indices)
    if isinstance(indices, (list, tuple)):
        assert [type(index) for index in arrived] == [type(index) for index in indices]


def test_a_list_of_ints_costs_eight_bytes_an_element() -> None:
    assert len(pack(list(range(65536)))) < 8 * 65536 + 16


def test_an_index_that_views_a_large_permutation_costs_its_own_bytes() -> None:
    assert len(pack([torch.randperm(1_000_000)[3], torch.randperm(1_000_000)[5]])) < 1000


def test_what_was_unpacked_may_be_written_to_and_shares_nothing() -> None:
    packed = pack([torch.zeros(4), np.zeros(4)])
    tensor, array = unpack(packed)
    tensor += 1
    array += 1
    assert_same(unpack(packed), [torch.zeros(4), np.zeros(4)])


def test_what_encoding_had_to_copy_is_alive_until_it_is_packed() -> None:
    strided = [np.arange(40_000.0)[:: -(n + 1)] for n in range(8)]
    assert_same(unpack(pack(strided)), strided)


# -- identity and aliasing --------------------------------------------------------------------------------------


def test_the_same_object_twice_arrives_as_one_object(slot: Slot) -> None:
    tensor, array, inner = torch.rand(3), np.ones(3), [1]
    arrived = slot.carry([tensor, array, inner, {"again": tensor}, array, inner])
    assert arrived[3]["again"] is arrived[0]
    assert arrived[4] is arrived[1]
    assert arrived[5] is arrived[2]


def test_a_list_that_holds_itself_arrives(slot: Slot) -> None:
    batch: list[Any] = [torch.ones(2)]
    batch.append(batch)
    arrived = slot.carry(batch)
    assert arrived[1] is arrived
    assert arrived[0].tolist() == [1, 1]


def test_a_write_through_one_view_shows_in_the_other(slot: Slot) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    whole, row, column, raw = slot.carry([base, base[1], base[:, 2], base.view(torch.uint8)])
    whole[1, 2] = -1
    assert row[2] == -1
    assert column[1] == -1
    assert raw[1].view(torch.float32)[2] == -1
    assert row._base is None


def test_disjoint_rows_of_one_storage_go_on_sharing_it(slot: Slot) -> None:
    base = torch.arange(8.0)
    first, second = slot.carry([base[:4], base[4:]])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert_same([first, second], [base[:4], base[4:]])


def test_every_view_dtype_is_aligned_where_views_of_a_storage_start_anywhere(slot: Slot) -> None:
    storage = torch.arange(64, dtype=torch.uint8)
    batch = [storage[35:37], storage[48:64].view(torch.complex128), storage[1:2], storage[8:16].view(torch.int64)]
    assert_same(slot.carry(batch), batch)


@pytest.mark.slow
def test_scattered_elements_of_one_storage_are_taken_apart_in_the_time_that_they_deserve() -> None:
    permutation = torch.randperm(8 * 16384)
    scattered = [permutation[8 * n] for n in range(16384)]
    assert torch.equal(torch.stack(unpack(pack(scattered))), permutation[::8])


# -- what travels -----------------------------------------------------------------------------------------------


def test_a_small_view_of_a_large_storage_ships_only_what_it_sees(slot: Slot) -> None:
    large = torch.rand(1_000_000)
    arrived = slot.carry([large[500:510], large[-1]])
    assert slot.layout is not None
    assert slot.layout.extent <= 4 * ALIGN_BYTES
    assert sum(tensor.untyped_storage().nbytes() for tensor in arrived) <= 44 + 2 * 16
    assert_same(arrived, [large[500:510], large[-1]])
    assert slot.carry(large[500:510]).untyped_storage().nbytes() == 40


def test_two_far_apart_views_of_one_storage_do_not_ship_what_lies_between(slot: Slot) -> None:
    large = torch.rand(1_000_000)
    batch = [large[:10], large[5:15], large[-10:]]
    assert_same(slot.carry(batch), batch)
    assert slot.layout is not None
    assert slot.layout.extent <= 4 * ALIGN_BYTES


def test_an_expanded_tensor_keeps_its_small_storage(slot: Slot) -> None:
    arrived = slot.carry(torch.ones(1).expand(1000, 1000))
    assert arrived.stride() == (0, 0)
    assert arrived.untyped_storage().nbytes() == 4


def test_need_is_what_place_needs() -> None:
    memory = Slot()
    batch = [torch.zeros(n) for n in (1, 0, 33, 7)]
    wanted = need(encode(batch))
    assert place(encode(batch), memory.address, wanted) is not None
    assert place(encode(batch), memory.address, wanted - ALIGN_BYTES) is None


def test_a_region_that_lies_in_the_range_already_stays_where_it_is() -> None:
    memory = Slot()
    inside = torch.frombuffer(memory.map, dtype=torch.float32, count=4, offset=2 * ALIGN_BYTES)
    encoded = encode([inside, torch.ones(4)])
    used = 3 * ALIGN_BYTES
    assert place(encoded, memory.address, memory.nbytes, used) == [2 * ALIGN_BYTES, used]
    assert need(encoded, memory.address, used) == 4 * ALIGN_BYTES


def test_a_region_that_lies_in_the_range_unaligned_is_copied_and_counted() -> None:
    memory = Slot()
    inside = torch.frombuffer(memory.map, dtype=torch.float32, count=40)
    inside[:] = torch.arange(40)
    encoded, used = encode([inside[10:14], inside[30:33]]), 3 * ALIGN_BYTES
    wanted = need(encoded, memory.address, used)
    assert place(encoded, memory.address, wanted - ALIGN_BYTES, used) is None
    offsets = place(encoded, memory.address, wanted, used)
    assert offsets is not None
    assert_same(decode(encoded.layout(offsets), memory.map), [inside[10:14], inside[30:33]])


# -- tensors that are not plain ---------------------------------------------------------------------------------


def sparse_coo() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]), torch.tensor([1.0, 2.0]), (3, 2))


SPECIAL = {
    "parameter": lambda: torch.nn.Parameter(torch.rand(3)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.rand(3), requires_grad=False),
    "leaf that requires grad": lambda: torch.rand(3, requires_grad=True),
    "0-d leaf that requires grad": lambda: torch.tensor(1.0, requires_grad=True),
    "sparse coo": sparse_coo,
    "coalesced": lambda: sparse_coo().coalesce(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "sparse csc": lambda: torch.eye(3).to_sparse_csc(),
    "sparse bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(1, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(1, 3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 2, torch.quint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.rand(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.rand(3, dtype=torch.complex64).conj(),
    "conjugate transposed": lambda: torch.rand(2, 3, dtype=torch.complex64).mH,
    "negative": lambda: torch.rand(3, dtype=torch.complex64).conj().imag,
    "subclass": lambda: tagged(torch.rand(3), note="here", inner=torch.ones(2)),
    "conjugate subclass": lambda: tagged(torch.rand(3, dtype=torch.complex64).conj(), note=1),
    "view of a subclass": lambda: tagged(torch.rand(8))[2:4],
    "packed sequence": lambda: torch.nn.utils.rnn.pack_sequence([torch.rand(3), torch.rand(2)]),
    "size": lambda: torch.Size([1, 2]),
}


@pytest.mark.filterwarnings("ignore:.*[Ss]parse", "ignore:.*nested tensors", "ignore:.*quantiz")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "jagged" else []) for name in SPECIAL]
)
def test_a_tensor_of_a_special_kind_arrives_as_it_was_sent(slot: Slot, name: str) -> None:
    sent = SPECIAL[name]()
    assert_same(slot.carry([sent, "between", sent]), [sent, "between", sent])
    assert_same(unpack(pack(sent)), sent)


@pytest.mark.parametrize("kind", [torch.UntypedStorage(8), torch.UntypedStorage(0)])
def test_a_storage_arrives(slot: Slot, kind: torch.UntypedStorage) -> None:
    assert slot.carry(kind).tolist() == kind.tolist()


def test_a_subclass_arrives_with_what_it_carries(slot: Slot) -> None:
    arrived = slot.carry(tagged(torch.arange(3.0), names=["a", "b", "c"]))
    assert type(arrived) is Tagged
    assert arrived.names == ["a", "b", "c"]


def test_a_tensor_that_autograd_tracks_is_refused_in_torchs_words() -> None:
    tracked = torch.rand(2, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor which requires_grad"):
        encode({"x": [tracked]})


def test_inside_inference_mode_what_arrives_is_no_inference_tensor(slot: Slot) -> None:
    batch = [torch.rand(3), torch.rand(2, 2).t(), torch.empty(0)]
    with torch.inference_mode():
        arrived = slot.carry(batch)
    assert_same(arrived, batch)


# -- arrays -----------------------------------------------------------------------------------------------------


def test_an_array_has_memory_of_its_own_and_may_be_written_to(slot: Slot) -> None:
    sent = np.arange(6.0).reshape(2, 3)
    sent.flags.writeable = False
    arrived = slot.carry(sent)
    arrived[0, 0] = 7
    assert not 0 <= arrived.ctypes.data - slot.address < slot.nbytes


@pytest.mark.parametrize(
    "sent",
    [
        np.array([{"a": 1}, None, "text"], object),
        np.array([[1, 2.5], [torch.ones(2), b"x"]], object),
        np.asfortranarray(np.array([["a", 1, None], ["b", 2, 3]], object)),
        np.array([("a", 1)], [("name", object), ("n", "i4")]),
    ],
    ids=["objects", "tensors", "fortran", "structured"],
)
def test_an_array_of_objects_arrives(slot: Slot, sent: np.ndarray[Any, Any]) -> None:
    assert_same(slot.carry(sent), sent)


@pytest.mark.parametrize("batch", [[], np.empty((0, 3)), [torch.empty(0), np.empty(0)], Ellipsis, {"a": {}}])
def test_a_batch_without_any_bytes_needs_no_memory(slot: Slot, batch: Any) -> None:
    slot.carry(batch)
    assert slot.layout is not None
    assert slot.layout.extent == 0
    assert repr(decode(slot.layout, None, 0, slot.values)) == repr(batch)


def test_an_array_in_foreign_byte_order_arrives_in_native_order_as_through_torchs_loader(slot: Slot) -> None:
    arrived = slot.carry(np.array([[1, 2], [3, 4]], ">f4", order="F"))
    assert arrived.dtype == np.dtype("f4")
    assert torch.from_numpy(arrived).tolist() == [[1, 2], [3, 4]]


@pytest.mark.skipif(
    not hasattr(getattr(np, "dtypes", None), "StringDType"), reason="numpy before 2.0 has no StringDType"
)
def test_an_array_of_variable_length_strings_arrives(slot: Slot) -> None:
    sent = np.array(["short", "long " * 100, ""], np.dtypes.StringDType())
    assert_same(slot.carry(sent), sent)


def test_a_memory_mapped_array_arrives_as_stock_pickle_hands_it_on(slot: Slot, tmp_path: Any) -> None:
    sent = np.memmap(tmp_path / "numbers", np.int32, "w+", shape=(3, 2))
    sent[:] = [[1, 2], [3, 4], [5, 6]]
    arrived, theirs = slot.carry(sent), pickle.loads(pickle.dumps(sent))
    assert type(arrived) is type(theirs)
    assert_same(np.asarray(arrived), np.asarray(theirs))


@pytest.mark.parametrize("kind", [np.ndarray, np.recarray, np.memmap])
@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
def test_a_read_only_array_arrives_writable_as_from_torchs_loader(slot: Slot, kind: Any, shape: Any) -> None:
    sent = np.ones(shape, [("a", "i4")] if kind is np.recarray else "i4").view(kind)
    sent.flags.writeable = False
    arrived = slot.carry(sent)
    assert type(arrived) is kind
    assert arrived.flags.writeable
    assert arrived.tolist() == sent.tolist()


def test_a_masked_array_arrives(slot: Slot) -> None:
    sent = np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])
    arrived = slot.carry(sent)
    assert type(arrived) is np.ma.MaskedArray
    assert arrived.tolist() == [1.0, None, 3.0]


def test_a_buffer_that_another_type_takes_out_of_band_arrives_on_the_slot(slot: Slot) -> None:
    arrived = slot.carry([Out(b"0123456789" * 10), torch.ones(3)])
    assert arrived[0].data == b"0123456789" * 10
    assert arrived[1].tolist() == [1, 1, 1]
    assert slot.layout is not None
    assert len(slot.layout.skeleton) < 100 + len(Out.__module__) * 2


class Out:
    """Hands its bytes to pickle as a buffer of its own."""

    def __init__(self, data: Any) -> None:
        self.data = bytes(data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Out, (pickle.PickleBuffer(self.data),)


# -- layouts as numbers -----------------------------------------------------------------------------------------


def layout_of(batch: Any) -> bytes:
    encoded, memory = encode(batch), Slot()
    offsets = place(encoded, memory.address, memory.nbytes)
    assert offsets is not None
    return encoded.layout(offsets).to_bytes()


class Known:
    """The main process's side: what it has been told about the numbers."""

    def __init__(self) -> None:
        self.interner = Interner()
        self.layouts: dict[int, bytes] = {}

    def hear(self, layout: bytes) -> int | None:
        """One answer: its layout by number where there is one, which must be the right one."""
        number, new = self.interner.number(layout)
        if new:
            assert number is not None
            self.layouts[number] = layout
        if number is not None:
            assert self.layouts[number] == layout
        return number


def test_batches_of_the_same_shapes_have_the_same_layout_and_others_do_not() -> None:
    def batch(n: int) -> Any:
        return {"x": torch.rand(n, 3), "y": torch.randint(9, (n,)), "z": Point(np.zeros(n), None)}

    assert layout_of(batch(4)) == layout_of(batch(4))
    assert len({layout_of(batch(n)) for n in range(1, 6)}) == 5


def test_a_layout_gets_its_number_when_it_comes_again_and_keeps_it() -> None:
    known = Known()
    assert [known.hear(b"first") for _ in range(4)] == [None, 0, 0, 0]
    assert [known.hear(b"second") for _ in range(3)] == [None, 1, 1]
    assert known.hear(b"first") == 0


def test_the_table_is_bounded_and_a_number_that_is_used_again_is_announced() -> None:
    known = Known()
    for turn in range(10):
        for n in range(3 * MOST_LAYOUTS):
            known.hear(b"%d" % n)
            known.hear(b"%d" % n)
        assert set(known.layouts) == set(range(MOST_LAYOUTS)), turn
    assert len(known.interner._numbers) == MOST_LAYOUTS
    assert len(known.interner._seen) <= 4 * MOST_LAYOUTS


def test_a_thousand_file_names_neither_get_numbers_nor_push_out_the_layouts_that_repeat() -> None:
    known = Known()
    fixed = [layout_of([np.zeros(n), "label"]) for n in (3, 5)]
    for layout in fixed * 2:
        known.hear(layout)
    for n in range(1000):
        assert known.hear(layout_of([np.zeros(3), f"photo-{n}.jpg"])) is None
        assert [known.hear(layout) for layout in fixed] == [0, 1]
    assert set(known.layouts) == {0, 1}
    assert len(known.interner._seen) <= 4 * MOST_LAYOUTS


def test_the_values_of_a_plain_nest_are_no_part_of_its_layout(slot: Slot) -> None:
    def batch(n: int) -> Any:
        return [torch.zeros(3), f"photo-{n}.jpg", {"size": n, "names": ["a"] * n, "at": Point(n / 2, None)}, (True, n)]

    assert len({layout_of(batch(n)) for n in range(20)}) == 1
    for n in range(3):
        assert_same(slot.carry(batch(n)), batch(n))
    assert encode(batch(1)).plain


def test_values_that_are_too_long_for_a_message_travel_with_the_pickle(slot: Slot) -> None:
    batch = [torch.ones(2), "x" * MOST_VALUE_BYTES]
    assert not encode(batch).plain
    assert_same(slot.carry(batch), batch)


class Stamped(NamedTuple):
    """A namedtuple that decides for itself how it is pickled."""

    stamp: str

    def __reduce__(self) -> Any:
        return Stamped, ("pickled",)


def test_a_namedtuple_with_a_reduction_of_its_own_is_pickled(slot: Slot) -> None:
    assert slot.carry([torch.ones(1), Stamped("made")])[1] == Stamped("pickled")


def test_a_list_at_two_places_is_one_list_at_the_other_side(slot: Slot) -> None:
    names = ["a", "b"]
    once, twice = slot.carry([torch.ones(1), names, {"again": names}])[1:]
    assert once is twice["again"]


def test_a_layout_survives_as_bytes() -> None:
    data = layout_of([torch.zeros(3), np.ones(2), torch.ones(2, 2).t()])
    layout = Layout.from_bytes(data + b"behind")
    assert layout.to_bytes() == data
    assert layout.head_bytes == len(data)
    assert layout.nbytes == 12 + 16 + 16


def test_each_batch_of_a_known_layout_gets_containers_of_its_own(slot: Slot) -> None:
    slot.carry({"a": [torch.zeros(1)], "b": {}})
    first, second = slot.again(), slot.again()
    first["a"].append(1)
    first["b"]["new"] = 2
    assert len(second["a"]) == 1
    assert second["b"] == {}


# -- what cannot be sent ----------------------------------------------------------------------------------------


class Attributes:
    """Has slots, and no ``__dict__``."""

    __slots__ = ("fine", "handle")

    def __init__(self, handle: Any) -> None:
        self.fine, self.handle = 1, handle


@pytest.mark.parametrize(
    ("batch", "where"),
    [
        (threading.Lock(), "batch"),
        ([0, threading.Lock()], "batch[1]"),
        ((torch.ones(1), {"meta": Record(lock=threading.Lock())}), "batch[1]['meta'].lock"),
        (Point(1, [threading.Lock()]), "batch.y[0]"),
        (Sample(torch.ones(1), (n for n in ())), "batch.label"),
        ({3: {"deep": [[lambda: 0]]}}, "batch[3]['deep'][0][0]"),
        ([Attributes(threading.Lock())], "batch[0].handle"),
        ({"x": torch.ones(1, requires_grad=True) * 2}, "batch['x']"),
        (tagged(torch.ones(1), lock=threading.Lock()), "batch.lock"),
    ],
)
def test_the_place_of_what_cannot_be_pickled_is_named(batch: Any, where: str) -> None:
    with pytest.raises(Exception, match=r".+"):
        encode(batch)
    assert locate(batch) == where


def test_naming_the_place_ends_in_a_nest_that_holds_itself() -> None:
    batch: list[Any] = []
    batch += [batch, threading.Lock()]
    assert locate(batch).startswith("batch[")


# -- memory -----------------------------------------------------------------------------------------------------


def test_encoding_keeps_nothing_of_the_batch_alive_once_dropped() -> None:
    batch = [torch.rand(3), [torch.rand(2)]]
    watch = [weakref.ref(batch[0]), weakref.ref(batch[1][0])]
    encoded = encode(batch)
    encoded.layout([0, 64])
    encoded.drop()
    del batch
    assert [ref() for ref in watch] == [None, None]

"""The address sanitizer: each kind of fault in a kernel of a few lines, beside a sound one.

The kernels here are toys, so that each has exactly one fault; ``test_mutants`` plants faults in the
real ones.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvproof.kernels.interpreter import is_interpreting

if not is_interpreting():
    pytest.skip("with a GPU the kernels are compiled", allow_module_level=True)

import triton
import triton.language as tl

from kvproof.kernels.interpreter import shuffled_programs
from kvproof.kernels.sanitizer import (
    Kind,
    Program,
    Region,
    SanitizerError,
    output,
    paged,
    reads,
    rows,
    sanitize,
    table,
    updates,
    visible_slots,
    workspace,
)

pytest_plugins = ["pytester"]


@triton.jit
def copy_kernel(source, target, n, shift, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(target + at, tl.load(source + at + shift, mask=at < n, other=0), mask=at < n)


@triton.jit
def unmasked_kernel(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def strided_kernel(source, target, stride, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at * stride))


@triton.jit
def no_other_kernel(source, target, n, MASK_STORE: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(source + at, mask=at < n)
    y = tl.exp2(x.to(tl.float32)) * 2.0
    if MASK_STORE:
        tl.store(target + at, y, mask=at < n)
    else:
        tl.store(target + at, y)


@triton.jit
def no_other_index_kernel(table_ptr, source, target, n, N: tl.constexpr):
    at = tl.arange(0, N)
    page = tl.load(table_ptr + at, mask=at < n)
    tl.store(target + at, tl.load(source + page))


@triton.jit
def weighted_kernel(weights, values, target, n, N: tl.constexpr):
    at = tl.arange(0, N)
    p = tl.load(weights + at, mask=at < n, other=0.0)
    v = tl.load(values + at[:, None] * N + at[None, :], mask=(at < n)[:, None])
    tl.store(target + at[None, :], tl.dot(p[None, :].to(v.dtype), v))


@triton.jit
def same_place_kernel(target):
    tl.store(target, tl.program_id(0))


@triton.jit
def neighbour_kernel(target, N: tl.constexpr):
    me = tl.program_id(0)
    tl.store(target + (me + 1) % N, tl.load(target + me))


@triton.jit
def count_kernel(target):
    tl.atomic_add(target, 1)


@triton.jit
def ticket_kernel(partial, ticket, target, N: tl.constexpr):
    me = tl.program_id(0)
    tl.store(partial + me, me + 1)
    if tl.atomic_add(ticket, 1) == N - 1:
        tl.store(target, tl.sum(tl.load(partial + tl.arange(0, N))))


@triton.jit
def swap_kernel(target, expected):
    tl.atomic_cas(target, expected, 5)


@triton.jit
def duplicates_kernel(target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at // 2, at)


@triton.jit
def wide_kernel(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    pair = source.to(tl.pointer_type(tl.int32))
    tl.store(target + at, tl.load(pair + at))


@triton.jit
def offset_kernel(source, target, block, stride):
    tl.store(target, tl.load(source + tl.load(block) * stride))


@triton.jit
def wide_offset_kernel(source, target, block, stride):
    tl.store(target, tl.load(source + tl.load(block).to(tl.int64) * stride))


@triton.jit
def load_row(base, row, N: tl.constexpr):
    at = tl.arange(0, N)
    return tl.load(base + row * N + at)


@triton.jit
def helper_kernel(source, target, row, N: tl.constexpr):
    tl.store(target + tl.arange(0, N), load_row(source, row, N))


@triton.jit
def gather_kernel(cache, table_ptr, lengths, target, width, DELTA, BLOCK: tl.constexpr):
    me = tl.program_id(0)
    length = tl.load(lengths + me)
    total = 0.0
    for token in range(length + DELTA):
        page = tl.load(table_ptr + me * width + token // BLOCK)
        total += tl.load(cache + page * BLOCK + token % BLOCK)
    tl.store(target + me, total)


@triton.jit
def descriptor_kernel(source, target, stride, N: tl.constexpr):
    tile = tl.make_tensor_descriptor(source, [N, N], [stride, 1], [N, N])
    at = tl.arange(0, N)
    tl.store(target + at[:, None] * N + at[None, :], tile.load([0, 0]))


def kinds(sanitizer) -> set[Kind]:
    return {report.kind for report in sanitizer.reports}


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


# What is right is passed over.


def test_a_sound_kernel_is_passed_over_and_computes_as_without() -> None:
    source, target = torch.arange(40.0), torch.empty(40)
    with sanitize(source=source, target=output(target)) as sanitizer:
        copy_kernel[(3,)](source, target, 40, 0, 16)
    assert torch.equal(source, target)
    assert (sanitizer.read_counts("source") == 1).all()
    assert (sanitizer.write_counts("target") == 1).all()


def test_tensors_nobody_named_are_known_by_the_kernels_parameters() -> None:
    source = ones(16)
    with sanitize(raises=False) as sanitizer:
        copy_kernel[(2,)](source, torch.empty(16), 17, 0, 16)
    found = {(report.kind, report.tensor) for report in sanitizer.reports}
    assert found == {(Kind.OUT_OF_BOUNDS, "source"), (Kind.OUT_OF_BOUNDS, "target")}
    details = [report.detail for report in sanitizer.reports]
    assert any("0 bytes past the end of 'source', float32 [16]" in detail for detail in details)
    assert any("0 bytes past the end of 'target'" in detail for detail in details)


def test_without_the_block_nothing_is_watched() -> None:
    source, target = ones(17), ones(17)
    with sanitize():
        pass
    copy_kernel[(2,)](source, target[:16], 17, 0, 16)


def test_blocks_are_not_nested() -> None:
    with sanitize(), pytest.raises(RuntimeError, match="cannot be nested"), sanitize():
        pass
    with sanitize():
        pass


# Bounds.


@pytest.mark.parametrize(
    ("shift", "where"),
    [(1, "0 bytes past the end of"), (-1, "4 bytes before the start of"), (1 << 29, "far from")],
)
def test_out_of_bounds(shift: int, where: str) -> None:
    """The far address would end the process, if it were touched."""
    source, target = ones(16), ones(16)
    with pytest.raises(SanitizerError, match=where) as caught, sanitize(source=source):
        copy_kernel[(1,)](source, target, 16, shift, 16)
    (report,) = caught.value.reports
    assert report.kind is Kind.OUT_OF_BOUNDS
    assert report.lanes == (1 if abs(shift) == 1 else 16)


def test_a_bad_store_is_not_carried_out() -> None:
    memory = torch.zeros(32)
    with sanitize(raises=False, target=updates(memory[:16])) as sanitizer:
        unmasked_kernel[(1,)](ones(32), memory[:16], 32)
    assert kinds(sanitizer) == {Kind.OUT_OF_BOUNDS}
    assert memory.tolist() == [1.0] * 16 + [0.0] * 16


def test_a_gap_between_rows_is_out_of_bounds() -> None:
    rows_ = torch.zeros(8, 6)[:, :4]
    with sanitize(raises=False, source=rows_) as sanitizer:
        strided_kernel[(1,)](rows_, ones(8), 5, 8)
    (report,) = sanitizer.reports
    assert report.kind is Kind.OUT_OF_BOUNDS
    assert "in a gap between the elements of 'source'" in report.detail
    with sanitize(source=rows_) as sanitizer:
        strided_kernel[(1,)](rows_, ones(8), 6, 8)
    assert sanitizer.read_counts("source")[:, 0].tolist() == [1] * 8


def test_interleaved_tensors_are_told_apart() -> None:
    """K and V in one allocation ``[N, 2, ...]``, as many engines keep them."""
    both = torch.arange(4 * 2 * 8.0).reshape(4, 2, 8)
    keys, values = both.unbind(1)
    target = ones(4)
    with sanitize(keys=keys, values=values) as sanitizer:
        strided_kernel[(1,)](values, target, 16, 4)
    assert sanitizer.read_counts("values")[:, 0].tolist() == [1] * 4
    assert not sanitizer.read_counts("keys").any()
    with sanitize(raises=False, keys=keys, values=updates(values)) as sanitizer:
        strided_kernel[(1,)](target, keys, 0, 4)
    assert kinds(sanitizer) == {Kind.READ_ONLY}
    assert sanitizer.reports[0].tensor == "keys"


def test_expanded_tensors_have_one_element() -> None:
    scale = ones(1).expand(8)
    with sanitize(scale=scale) as sanitizer:
        strided_kernel[(1,)](scale, ones(8), 0, 8)
    assert sanitizer.read_counts("scale").tolist() == [8] * 8
    with pytest.raises(SanitizerError), sanitize(scale=scale):
        strided_kernel[(1,)](scale, ones(8), 1, 8)


def test_element_width() -> None:
    halves = ones(16, dtype=torch.float16)
    with sanitize(raises=False, source=halves) as sanitizer:
        wide_kernel[(1,)](halves, ones(8, dtype=torch.int32), 8)
    assert kinds(sanitizer) == {Kind.WIDTH}
    assert "4 bytes at once of 'source', whose elements have 2" in sanitizer.reports[0].detail


def test_descriptors_are_watched() -> None:
    source, target = torch.zeros(16, 24)[:, :16], torch.empty(16, 16)
    with sanitize(source=source, target=output(target)):
        descriptor_kernel[(1,)](source, target, 24, 16)
    with pytest.raises(SanitizerError), sanitize(source=source):
        descriptor_kernel[(1,)](source, target, 28, 16)


# Rights.


def test_a_read_only_tensor_is_not_written() -> None:
    source = torch.zeros(16)
    with sanitize(raises=False, target=source) as sanitizer:
        unmasked_kernel[(1,)](ones(16), source, 16)
    assert kinds(sanitizer) == {Kind.READ_ONLY}
    assert not source.any()


def test_a_write_only_tensor_is_not_read() -> None:
    result = ones(16)
    with sanitize(raises=False, result=Region(result, readable=False, writable=True)) as sanitizer:
        unmasked_kernel[(1,)](result, ones(16), 16)
    assert kinds(sanitizer) == {Kind.WRITE_ONLY}


def test_forbidden_elements() -> None:
    source, allowed = ones(16), torch.arange(16) < 12
    with sanitize(raises=False, source=reads(source, allowed)) as sanitizer:
        unmasked_kernel[(1,)](source, ones(16), 16)
    (report,) = sanitizer.reports
    assert (report.kind, report.tensor, report.index) == (Kind.FORBIDDEN, "source", (12,))
    assert report.lanes == 4
    with sanitize(source=reads(source, allowed)):
        copy_kernel[(1,)](source, ones(16), 12, 0, 16)


# Who it belongs to.


def paged_case():
    """Two sequences of 5 and 3 tokens in blocks of 2; block 3 is free, table padding is wild."""
    block_table = torch.tensor([[4, 0, 2], [1, 5, 999]], dtype=torch.int32)
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    cache = torch.arange(12.0).reshape(6, 2)
    return cache, block_table, lengths, torch.empty(2)


def run_gather(cache, block_table, lengths, target, delta=0, **named):
    with sanitize(
        raises=False,
        sequence_of=lambda program: program.index[0],
        cache=paged(cache, block_table, lengths, **named),
        table=table(block_table, lengths, 2),
        lengths=rows(lengths, torch.arange(3)),
        target=rows(output(target), torch.arange(3)),
    ) as sanitizer:
        gather_kernel[(2,)](cache, block_table, lengths, target, 3, delta, 2)
    return sanitizer


def test_own_slots_are_passed_over_and_counted() -> None:
    cache, block_table, lengths, target = paged_case()
    sanitizer = run_gather(cache, block_table, lengths, target)
    assert sanitizer.reports == []
    assert target.tolist() == [8.0 + 9 + 0 + 1 + 4, 2.0 + 3 + 10]
    visible = visible_slots(block_table, lengths, 6, 2).any(0)
    assert torch.equal(sanitizer.read_counts("cache"), visible.int())


def test_one_token_too_far_is_a_forbidden_slot() -> None:
    sanitizer = run_gather(*paged_case(), delta=1)
    (report,) = sanitizer.reports
    # Of sequence 0 the sixth token is slot 1 of block 2; of sequence 1 slot 1 of block 5.
    assert (report.kind, report.tensor, report.index) == (Kind.FORBIDDEN, "cache", (2, 1))
    assert (report.lanes, report.accesses) == (2, 2)
    assert report.program == Program("gather_kernel", (0, 0, 0), (2, 1, 1))


def test_table_padding_is_a_forbidden_slot() -> None:
    sanitizer = run_gather(*paged_case(), delta=2)
    assert (Kind.FORBIDDEN, "table") in {(r.kind, r.tensor) for r in sanitizer.reports}


def test_another_sequences_slot() -> None:
    cache, block_table, lengths, target = paged_case()
    mixed = block_table.clone()
    mixed[1, 0] = 4
    with sanitize(
        raises=False,
        sequence_of=lambda program: program.index[0],
        cache=paged(cache, block_table, lengths),
    ) as sanitizer:
        gather_kernel[(2,)](cache, mixed, lengths, target, 3, 0, 2)
    (report,) = sanitizer.reports
    assert (report.kind, report.index) == (Kind.OTHER_SEQUENCE, (4, 0))
    assert "belongs to sequence 0, and this program works for sequence 1" in report.detail


def test_whose_program_it_is_may_be_said_later() -> None:
    cache, block_table, lengths, target = paged_case()
    with sanitize(raises=False) as sanitizer:
        sanitizer.declare(lengths=rows(lengths, torch.arange(3)))
        gather_kernel[(2,)](cache, block_table, lengths, target, 3, 0, 2)
        assert sanitizer.reports == []
        sanitizer.works_for(lambda program: 1 - program.index[0])
        gather_kernel[(2,)](cache, block_table, lengths, target, 3, 0, 2)
    (report,) = sanitizer.reports
    assert (report.kind, report.tensor) == (Kind.OTHER_SEQUENCE, "lengths")


def test_a_shared_prefix_belongs_to_both() -> None:
    cache, block_table, lengths, target = paged_case()
    block_table[1, 0] = 4
    assert run_gather(cache, block_table, lengths, target).reports == []


def test_before_the_window_is_forbidden() -> None:
    sanitizer = run_gather(*paged_case(), window=2)
    (report,) = sanitizer.reports
    assert (report.kind, report.index, report.lanes) == (Kind.FORBIDDEN, (4, 0), 4)


@pytest.mark.parametrize(
    ("length", "queries", "window", "first"),
    [(9, 1, 0, 0), (9, 1, 4, 5), (9, 3, 4, 3), (9, 9, 4, 0), (3, 1, 4, 0), (9, 1, 1, 8)],
)
def test_what_queries_see(length: int, queries: int, window: int, first: int) -> None:
    row = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    slots = visible_slots(
        row,
        torch.tensor([length]),
        3,
        4,
        window=window,
        query_lengths=torch.tensor([queries]),
    )
    in_order = torch.cat([slots[0, block] for block in (2, 0, 1)])
    assert in_order.nonzero().flatten().tolist() == list(range(first, length))


def test_no_query_sees_nothing() -> None:
    row, none = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0])
    assert not visible_slots(row, torch.tensor([4]), 1, 4, query_lengths=none).any()
    assert not visible_slots(row, torch.tensor([0]), 1, 4).any()


def test_other_layouts_of_a_cache() -> None:
    """Blocks and slots in other dimensions: ``[N, KH, BS, D]``."""
    row, length = torch.tensor([[1]], dtype=torch.int32), torch.tensor([2])
    region = paged(torch.zeros(2, 3, 4, 5), row, length, slot_dim=2)
    assert region.by_sequence is not None
    assert region.by_sequence.shape == (1, 2, 1, 4, 1)
    assert region.by_sequence.nonzero()[:, [1, 3]].tolist() == [[1, 0], [1, 1]]


# What was written, and by whom.


def test_uninitialised_reads() -> None:
    scratch = torch.zeros(16)
    with sanitize(raises=False, scratch=workspace(scratch)) as sanitizer:
        copy_kernel[(1,)](ones(16), scratch, 12, 0, 16)
        unmasked_kernel[(1,)](scratch, ones(16), 16)
    (report,) = sanitizer.reports
    assert (report.kind, report.index, report.lanes) == (Kind.UNINITIALISED, (12,), 4)


@pytest.mark.parametrize("allocate", [torch.empty, ones(1).new_empty])
def test_what_torch_allocates_is_uninitialised(allocate) -> None:
    with sanitize(raises=False) as sanitizer:
        unmasked_kernel[(1,)](allocate(16), ones(16), 16)
    assert kinds(sanitizer) == {Kind.UNINITIALISED}


@pytest.mark.parametrize(
    "write",
    [
        lambda scratch: scratch.zero_(),
        lambda scratch: scratch[:].fill_(1),
        lambda scratch: scratch.__setitem__(slice(None), 1),
        lambda scratch: torch.add(ones(16), 1, out=scratch),
        lambda scratch: scratch.numpy(),
    ],
)
@pytest.mark.parametrize("launch_first", [False, True])
def test_what_torch_writes_is_initialised(write, launch_first: bool) -> None:
    with sanitize():
        scratch = torch.empty(16)
        if launch_first:
            copy_kernel[(1,)](ones(16), scratch, 1, 0, 16)
        write(scratch)
        unmasked_kernel[(1,)](scratch, ones(16), 16)


def test_unwritten_outputs() -> None:
    target = torch.empty(16)
    with pytest.raises(SanitizerError) as caught, sanitize(target=output(target)):
        copy_kernel[(1,)](ones(16), target, 12, 0, 16)
    (report,) = caught.value.reports
    assert (report.kind, report.index) == (Kind.UNWRITTEN, (12,))
    assert "no program wrote target[12], nor 3 more elements" in str(report)
    with sanitize(target=output(target, torch.arange(16) < 12)):
        copy_kernel[(1,)](ones(16), target, 12, 0, 16)


def test_two_programs_write_one_element() -> None:
    target = torch.zeros(1, dtype=torch.int32)
    with sanitize(raises=False) as sanitizer:
        same_place_kernel[(3,)](target)
    (report,) = sanitizer.reports
    assert report.kind is Kind.RACE
    assert "target[0] is written, and program (0, 0, 0) of the same launch wrote it" in str(report)
    assert report.accesses == 2


def test_two_launches_may_write_one_element() -> None:
    target = torch.zeros(1, dtype=torch.int32)
    with sanitize():
        same_place_kernel[(1,)](target)
        same_place_kernel[(1,)](target)


@pytest.mark.parametrize("seed", range(3))
def test_reading_what_another_program_writes(seed: int) -> None:
    """In whichever order: the race is found if the read comes first as well."""
    with sanitize(raises=False) as sanitizer, shuffled_programs(seed):
        neighbour_kernel[(4,)](ones(4), 4)
    assert kinds(sanitizer) == {Kind.RACE}
    assert {report.location.function for report in sanitizer.reports} == {"neighbour_kernel"}


def test_atomics_are_no_race() -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    with sanitize() as sanitizer:
        count_kernel[(5,)](counter)
    assert counter.item() == 5
    assert sanitizer.write_counts("target").tolist() == [5]


def test_a_program_that_waited_for_the_others_may_read_what_they_wrote() -> None:
    partial, ticket, target = (torch.zeros(n, dtype=torch.int32) for n in (4, 1, 1))
    with sanitize():
        ticket_kernel[(4,)](partial, ticket, target, 4)
    assert target.item() == 10


def test_atomics_are_judged() -> None:
    counter = torch.zeros(2, dtype=torch.int32)
    with sanitize(raises=False, counter=counter) as sanitizer:
        count_kernel[(1,)](counter)
        swap_kernel[(1,)](counter, 0)
    assert kinds(sanitizer) == {Kind.READ_ONLY}
    assert counter.tolist() == [0, 0]
    with sanitize(raises=False, counter=updates(counter[:1])) as sanitizer:
        count_kernel[(1,)](counter[1:])
        swap_kernel[(1,)](counter, 0)
    assert sanitizer.reports == []
    assert counter.tolist() == [5, 1]


def test_duplicate_lanes() -> None:
    with sanitize(raises=False) as sanitizer:
        duplicates_kernel[(1,)](torch.zeros(16, dtype=torch.int32), 16)
    (report,) = sanitizer.reports
    assert (report.kind, report.index, report.lanes) == (Kind.DUPLICATE_LANES, (0,), 8)


# Masked-off lanes.


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_missing_other(dtype, stored) -> None:
    source, target = torch.zeros(16).to(dtype), torch.zeros(16).to(stored)
    with sanitize(raises=False) as sanitizer:
        no_other_kernel[(1,)](source, target, 12, False, 16)
    (report,) = sanitizer.reports
    assert (report.kind, report.tensor, report.index) == (Kind.MISSING_OTHER, "target", (12,))
    assert report.lanes == 4
    if torch.float8_e4m3fn is not dtype and stored is not torch.float8_e5m2:
        assert re.search(r"test_sanitizer\.py:\d+ \(no_other_kernel\)", report.detail)
    assert target.float()[12:].isnan().all()


def test_missing_other_through_a_product_with_zero() -> None:
    values = ones(16, 16)
    with sanitize(raises=False) as sanitizer:
        weighted_kernel[(1,)](ones(16), values, torch.zeros(16), 12, 16)
    assert kinds(sanitizer) == {Kind.MISSING_OTHER}


def test_no_other_is_no_fault_where_it_is_masked_again() -> None:
    with sanitize():
        no_other_kernel[(1,)](ones(16), ones(16), 12, True, 16)


def test_missing_other_of_an_index_leads_astray() -> None:
    pages = torch.arange(16, dtype=torch.int32)
    with sanitize(raises=False) as sanitizer:
        no_other_index_kernel[(1,)](pages, ones(16), ones(16), 12, 16)
    (report,) = sanitizer.reports
    assert (report.kind, report.lanes) == (Kind.OUT_OF_BOUNDS, 4)


def test_without_poison_masked_lanes_are_zero() -> None:
    target = torch.full((16,), -1.0)
    with sanitize(poison=False):
        no_other_kernel[(1,)](ones(16), target, 12, False, 16)
    assert target.tolist() == [4.0] * 12 + [2.0] * 4


def test_nan_in_memory_is_not_poison() -> None:
    nan = torch.full((16,), float("nan"))
    with sanitize():
        no_other_kernel[(1,)](nan, ones(16), 16, False, 16)
        no_other_kernel[(1,)](nan.bfloat16(), ones(16, dtype=torch.bfloat16), 16, False, 16)


# Overflow.


def test_overflow_of_an_offset() -> None:
    """The class of vllm pull 47671: block times stride leaves 32 bits in a pool of gigabytes."""
    pool = torch.empty(3 << 30, dtype=torch.int8)
    block, target = torch.tensor([70_000], dtype=torch.int32), ones(1, dtype=torch.int8)
    region = Region(pool, bounds_only=True)
    with sanitize(raises=False, overflow=True, pool=region) as sanitizer:
        offset_kernel[(1,)](pool, target, block, 40_000)
    assert kinds(sanitizer) == {Kind.OVERFLOW, Kind.OUT_OF_BOUNDS}
    overflow = next(r for r in sanitizer.reports if r.kind is Kind.OVERFLOW)
    assert "'mul'" in overflow.detail
    assert overflow.location is not None
    assert overflow.location.function == "offset_kernel"
    with sanitize(overflow=True, pool=region):
        wide_offset_kernel[(1,)](pool, target, block, 40_000)


def test_bounds_only_keeps_rights_and_bounds() -> None:
    pool = torch.zeros(16)
    with sanitize(raises=False, pool=Region(pool, bounds_only=True)) as sanitizer:
        copy_kernel[(1,)](ones(17), pool, 16, 0, 16)
        copy_kernel[(1,)](pool, ones(16), 16, 1, 16)
    assert kinds(sanitizer) == {Kind.READ_ONLY, Kind.OUT_OF_BOUNDS}
    assert not pool.any()
    with pytest.raises(ValueError, match="bounds only"):
        sanitizer.read_counts("pool")


def test_a_large_tensor_that_nobody_has_named_is_checked_for_its_bounds() -> None:
    pool = torch.empty(1 << 30, dtype=torch.uint8)
    with sanitize(raises=False) as sanitizer:
        copy_kernel[(1,)](pool, torch.empty(16, dtype=torch.uint8), 16, 1 << 30, 16)
    assert kinds(sanitizer) == {Kind.OUT_OF_BOUNDS}
    with pytest.raises(ValueError, match="bounds only"):
        sanitizer.read_counts("source")


# The report.


def test_the_report_names_the_line_of_the_helper_that_is_wrong() -> None:
    source = ones(2, 16)
    with pytest.raises(SanitizerError) as caught, sanitize(source=source):
        helper_kernel[(1,)](source, ones(16), 2, 16)
    (report,) = caught.value.reports
    assert report.location is not None
    assert report.location.function == "load_row"
    assert report.location.source == "return tl.load(base + row * N + at)"
    text = str(caught.value)
    assert text.startswith("the sanitizer found 1 fault\nout of bounds: 0 bytes past the end of")
    assert "first in program (0, 0, 0) of helper_kernel, grid (1, 1, 1)" in text
    assert "16 lanes in 1 access" in text


def test_one_report_per_line_however_often() -> None:
    target = ones(16)
    with sanitize(raises=False) as sanitizer:
        for _ in range(3):
            copy_kernel[(1,)](target, ones(16), 16, 1, 16)
    (report,) = sanitizer.reports
    assert (report.accesses, report.lanes) == (3, 3)


def test_a_failing_block_raises_the_reports_from_its_error() -> None:
    def block(shift: int) -> None:
        with sanitize():
            copy_kernel[(1,)](source, ones(16), 16, shift, 16)
            raise AssertionError("the values are wrong, too")

    source = ones(16)
    with pytest.raises(SanitizerError) as caught:
        block(1)
    assert str(caught.value.__cause__) == "the values are wrong, too"
    with pytest.raises(AssertionError, match=r"^the values") as caught_alone:
        block(0)
    assert not isinstance(caught_alone.value, SanitizerError)


# Usage.


def test_names_and_memory_are_given_once() -> None:
    cache = ones(16)
    with sanitize(cache=cache) as sanitizer:
        with pytest.raises(ValueError, match="'cache' is registered already"):
            sanitizer.declare(cache=ones(3))
        with pytest.raises(ValueError, match="'view' and 'cache' share memory"):
            sanitizer.declare(view=cache[4:])
        with pytest.raises(KeyError, match="no tensor 'kache'; there are: cache"):
            sanitizer.read_counts("kache")


@pytest.mark.parametrize(
    ("named", "complaint"),
    [
        ({"allowed": torch.ones(4)}, "allowed must be a bool tensor"),
        ({"by_sequence": torch.ones(4, dtype=torch.bool)}, "by_sequence must have 2 dimensions"),
        ({"allowed": torch.ones(4, dtype=torch.bool), "bounds_only": True}, "has no effect"),
    ],
)
def test_regions_that_make_no_sense(named, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Region(ones(4), **named)


def test_blocks_come_before_slots() -> None:
    with pytest.raises(ValueError, match="must come before slots"):
        paged(ones(2, 2), torch.zeros(1, 1), torch.tensor([1]), block_dim=1, slot_dim=0)


def test_empty_tensors() -> None:
    nothing = torch.empty(0)
    with sanitize(nothing=nothing, target=output(torch.empty(0))):
        copy_kernel[(1,)](nothing, torch.empty(0), 0, 0, 16)


FIXTURE_TEST = """
import torch, triton, triton.language as tl

@triton.jit
def copy_kernel(source, target, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at, mask=at < n, other=0), mask=at < n)

def test_sound(kernel_sanitizer):
    source = torch.ones(12)
    kernel_sanitizer.declare(source=source)
    copy_kernel[(1,)](source, torch.empty(12), 12, 16)
    assert (kernel_sanitizer.read_counts("source") == 1).all()

def test_faulty(kernel_sanitizer):
    copy_kernel[(1,)](torch.ones(12), torch.empty(12), 13, 16)

def test_watched_no_more():
    memory = torch.ones(16)
    copy_kernel[(1,)](memory[:12], torch.empty(16), 13, 16)
"""


def test_the_fixture_fails_the_test_of_a_faulty_kernel(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from kvproof.kernels.interpreter import use_interpreter\n"
        "use_interpreter()\n"
        "pytest_plugins = ['kvproof.kernels.sanitizer.plugin']\n"
    )
    pytester.makepyfile(FIXTURE_TEST)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*out of bounds: 0 bytes past the end of 'source'*"])


def test_the_example_of_the_documentation_reports_what_it_says(pytester: pytest.Pytester) -> None:
    text = (Path(__file__).parents[2] / "docs" / "sanitizer.md").read_text(encoding="utf-8")
    example = next(block for block in text.split("```python\n") if "def mean_kernel" in block)
    report = text.partition("SanitizerError: ")[2].partition("```")[0]
    pytester.makepyfile(test_mean=example.partition("```")[0])
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    printed = result.stdout.str()
    assert report.startswith("the sanitizer found 4 faults")
    for line in report.splitlines():
        assert line.strip() in printed

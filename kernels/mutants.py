"""Faults planted in the kernels, to see that the tests would find them: mutation testing.

A mutant replaces exact pieces of the kernels' source text; where a piece is not found exactly once,
planting it is an error, so that the list cannot go stale.  The checks that must catch it stand with
it.  Sources name the public bug that it is modelled on.

Checks:

* ``value``: the result against float64 with finite memory everywhere, as a usual test has it;
* ``poison``: only with NaN in every slot that must not be read, in the result, the workspace and
  in masked-off lanes without ``other=``;
* ``sanitizer``: an access that may not be;
* ``reads``: a visible key or value read more or less often than it has to be;
* ``laws``: a bitwise law, such as that a row of a batch does not depend on the others.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeAlias

FOLDER = Path(__file__).parent
COPIED = ("problem", "cache")
"""Modules that are copied beside the folder ``attention``: those that import the kernels."""


TriedOn: TypeAlias = Literal["decode", "unified", "mla", "cache"]
"""A kind of problem, or what moves keys and values."""


@dataclass(frozen=True)
class Mutant:
    """A fault: ``pieces`` of a function of ``module`` (below ``kvproof.kernels``) are replaced.

    ``caught_by`` are all the checks that catch it, on the problems of
    ``kvproof.kernels.mutation_checks``; ``kinds`` are the kinds of problem that it is tried on.
    """

    id: str
    module: str
    function: str
    kinds: tuple[TriedOn, ...]
    pieces: tuple[tuple[str, str], ...]
    caught_by: frozenset[str]
    source: str


class StaleMutant(LookupError):
    """The text that a mutant replaces is not, or not only once, in the source."""


def mutated(mutant: Mutant, text: str) -> str:
    """The source ``text`` with the fault planted."""
    before, head, rest = text.partition(f"\ndef {mutant.function}(")
    body, gap, after = rest.partition("\n\n\n")  # functions stand two lines apart
    for old, new in mutant.pieces:
        if body.count(old) != 1:
            found = f"found {body.count(old)} times in {mutant.function}"
            raise StaleMutant(f"{mutant.id}: {found}: {old!r}")
        body = body.replace(old, new)
    return before + head + body + gap + after


@dataclass(frozen=True)
class Planted:
    """The modules with a fault in them (or without), as a caller of the kernels sees them."""

    problem: ModuleType
    cache: ModuleType


@contextmanager
def planted(mutant: Mutant | None) -> Iterator[Planted]:
    """A copy of the kernels, imported under another name, with the fault of ``mutant`` in it.

    Raises:
        StaleMutant: The kernels have changed.
    """
    name = "sound" if mutant is None else mutant.id.replace("-", "_")
    package = f"kvproof_mutant_{name}"
    with tempfile.TemporaryDirectory() as folder:
        _write_copy(Path(folder) / package, package, mutant)
        sys.path.insert(0, folder)
        invalidate_caches()
        try:
            yield Planted(*(import_module(f"{package}.{part}") for part in COPIED))
        finally:
            sys.path.remove(folder)
            for module in [m for m in sys.modules if m.split(".")[0] == package]:
                del sys.modules[module]


def _write_copy(folder: Path, package: str, mutant: Mutant | None) -> None:
    sources = [FOLDER / f"{part}.py" for part in COPIED]
    sources += sorted((FOLDER / "attention").glob("*.py"))
    for source in sources:
        relative = source.relative_to(FOLDER)
        text = source.read_text(encoding="utf-8")
        if mutant is not None and str(relative.with_suffix("")) == mutant.module:
            text = mutated(mutant, text)
        for part in ("attention", *COPIED):
            text = text.replace(f"kvproof.kernels.{part}", f"{package}.{part}")
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (folder / "__init__.py").touch()


KERNELS: dict[str, tuple[str, tuple[TriedOn, ...]]] = {
    "decode_kernel": ("attention/decode", ("decode",)),
    "merge_kernel": ("attention/decode", ("decode",)),
    "unified_kernel": ("attention/unified", ("unified",)),
    "sequence_of": ("attention/unified", ("unified",)),
    "mla_kernel": ("attention/mla", ("mla",)),
    "advance": ("attention/softmax", ("unified", "decode")),
    "tanh": ("attention/softmax", ("decode", "unified")),
    "write_kernel": ("cache", ("cache",)),
    "copy_kernel": ("cache", ("cache",)),
}
"""Where each function stands, and the kinds of problem that run it."""


def _mutant(id: str, function: str, pieces: dict[str, str], caught_by: str, source: str) -> Mutant:
    module, kinds = KERNELS[function]
    caught = frozenset(caught_by.split())
    return Mutant(id, module, function, kinds, tuple(pieces.items()), caught, source)


END = "end = tl.minimum(begin + split_size, length)"
FIRST = "first = tl.maximum(length - window, 0)"
K_LOAD = """k_ptr + k_row[:, None] + dim[None, :] * stride_k_dim,
            mask=is_key[:, None] & (dim < HEAD_SIZE)[None, :],
            other=0.0,
"""
V_MASK = """mask=is_key[:, None] & (value < VALUE_SIZE)[None, :],
            other=0.0,
"""
OUT_MASK = "mask=is_row[:, None] & (value < VALUE_SIZE)[None, :],\n    )\n"
LSE_MASK = "        lse,\n        mask=is_row,\n"

MUTANTS: tuple[Mutant, ...] = (
    # Which keys: ends, windows, splits.
    _mutant(
        "decode-reads-the-whole-last-block",
        "decode_kernel",
        {END: END.replace("length", "tl.cdiv(length, BLOCK_SIZE) * BLOCK_SIZE")},
        "value sanitizer reads laws",
        "B167: vllm pull 936, rows past the context in the last block",
    ),
    _mutant(
        "decode-one-key-too-many",
        "decode_kernel",
        {END: END.replace("length", "length + 1")},
        "value sanitizer reads laws",
        "prototype: <= for <",
    ),
    _mutant(
        "decode-drops-the-oldest-key-of-the-window",
        "decode_kernel",
        {FIRST: FIRST.replace("window", "window + 1")},
        "value reads",
        "sglang 32087, vllm 3385 and 4405: window off by one",
    ),
    _mutant(
        "decode-sees-one-key-before-the-window",
        "decode_kernel",
        {FIRST: FIRST.replace("window", "window - 1")},
        "value sanitizer reads",
        "the same, to the other side",
    ),
    _mutant(
        "decode-ignores-the-window",
        "decode_kernel",
        {FIRST: "first = 0"},
        "value sanitizer reads",
        "mistral.rs 2094, B182: the window is not honoured in decode",
    ),
    _mutant(
        "decode-loads-before-the-window-and-masks-scores",
        "decode_kernel",
        {
            "start = tl.maximum(begin, first)": "start = begin",
            "if start == first:": "if begin <= first:",
            "s = tl.where(is_key[None, :], s": "s = tl.where((is_key & (key >= first))[None, :], s",
        },
        "poison sanitizer reads",
        "B169: vllm pull 30887, blocks before the window may be freed",
    ),
    _mutant(
        "decode-splits-overlap",
        "decode_kernel",
        {END: END.replace("split_size", "split_size + TILE_KEYS")},
        "value reads",
        "prototype: two splits count a key",
    ),
    _mutant(
        "decode-split-lse-not-stored",
        "decode_kernel",
        {LSE_MASK: LSE_MASK.replace("is_row", "is_row & (split == 0)")},
        "value sanitizer",
        "B191: flashinfer 50, the partial LSE is not stored",
    ),
    _mutant(
        "merge-reads-one-split-too-many",
        "merge_kernel",
        {
            "splits = tl.cdiv(length, split_size) - first // split_size": (
                "splits = tl.cdiv(length, split_size) - first // split_size + 1"
            )
        },
        "value sanitizer laws",
        "B185: aiter 3641, a split without a key stays unwritten",
    ),
    _mutant(
        "decode-sink-in-every-split",
        "decode_kernel",
        {"        if start == first:\n": "        if start >= first:\n"},
        "value",
        "the sink is one score, not one per split",
    ),
    # Where they are: tables, blocks, heads.
    _mutant(
        "decode-reads-the-row-before",
        "decode_kernel",
        {
            "table_ptr += batch * stride_table": (
                "table_ptr += tl.maximum(batch - 1, 0) * stride_table"
            )
        },
        "value sanitizer reads laws",
        "B26: a kernel indexes another request's blocks",
    ),
    _mutant(
        "decode-wrong-slot",
        "decode_kernel",
        {"slot = (key % BLOCK_SIZE).to(tl.int64)": "slot = ((key + 1) % BLOCK_SIZE).to(tl.int64)"},
        "value sanitizer reads laws",
        "prototype: slots of a block rotated",
    ),
    _mutant(
        "decode-query-head-for-kv-head",
        "decode_kernel",
        {
            "k_ptr += kv_head * stride_k_head": "k_ptr += kv_head * GROUP * stride_k_head",
            "v_ptr += kv_head * stride_v_head": "v_ptr += kv_head * GROUP * stride_v_head",
        },
        "value sanitizer reads laws",
        "B187: LMCache 3092, query head index used for K and V",
    ),
    _mutant(
        "decode-v-has-the-strides-of-k",
        "decode_kernel",
        {
            "v_row = block.to(tl.int64) * stride_v_block + slot * stride_v_slot": (
                "v_row = block.to(tl.int64) * stride_k_block + slot * stride_k_slot"
            )
        },
        "value sanitizer reads",
        "B189: flashinfer 527, strides of the caches not considered",
    ),
    _mutant(
        "decode-32-bit-offsets",
        "decode_kernel",
        {
            "k_row = block.to(tl.int64) * stride_k_block": (
                "k_row = block.to(tl.int32) * stride_k_block"
            )
        },
        "value sanitizer",
        "B171: vllm pull 47671, block id times stride leaves 32 bits",
    ),
    _mutant(
        "unified-prefetches-past-the-table",
        "unified_kernel",
        {
            "block = tl.load(table_ptr + key_ahead // BLOCK_SIZE, mask=key_ahead < end, other=0)": (
                "block = tl.load(table_ptr + key_ahead // BLOCK_SIZE)"
            )
        },
        "sanitizer",
        "B170: vllm 56862, table entries of tail lanes",
    ),
    # What masks leave, and what they give.
    _mutant(
        "decode-no-other-for-k",
        "decode_kernel",
        {K_LOAD: K_LOAD.replace("            other=0.0,\n", "")},
        "poison sanitizer",
        "prototype: lanes past the head size are 0 in the interpreter, anything on a GPU",
    ),
    _mutant(
        "decode-no-other-for-v",
        "decode_kernel",
        {V_MASK: V_MASK.replace("            other=0.0,\n", "")},
        "poison sanitizer",
        "prototype: 0 times garbage",
    ),
    _mutant(
        "decode-loads-v-of-masked-keys",
        "decode_kernel",
        {V_MASK: V_MASK.replace("is_key[:, None] & ", "")},
        "poison sanitizer reads laws",
        "B169: vllm pull 30887, V loaded without the mask of the keys",
    ),
    _mutant(
        "decode-forgets-the-score-mask",
        "decode_kernel",
        {'        s = tl.where(is_key[None, :], s, float("-inf"))\n': ""},
        "value",
        "prototype: masked keys get a score of 0",
    ),
    _mutant(
        "decode-stores-rows-of-other-heads",
        "decode_kernel",
        {OUT_MASK: OUT_MASK.replace("is_row[:, None] & ", "")},
        "value sanitizer laws",
        "prototype: store without the mask of the heads",
    ),
    # Scores.
    _mutant(
        "decode-masks-before-the-cap",
        "decode_kernel",
        {
            's = tl.where(is_key[None, :], s, float("-inf"))': (
                "s = tl.where(is_key[None, :], s, -softcap * LOG2E if HAS_SOFTCAP else "
                'float("-inf"))'
            )
        },
        "value",
        "B181: flashinfer 350, the cap makes a masked score finite",
    ),
    _mutant(
        "decode-drops-the-scale-of-k",
        "decode_kernel",
        {"scale = scale * tl.load(k_scale_ptr + kv_head * stride_k_scale)": "scale = scale * 1.0"},
        "value",
        "B179, B180: sglang 24198, vllm 42580, scales not applied on one path",
    ),
    _mutant(
        "decode-takes-the-scale-of-k-for-v",
        "decode_kernel",
        {
            "out *= tl.load(v_scale_ptr + kv_head * stride_v_scale)": (
                "out *= tl.load(k_scale_ptr + kv_head * stride_k_scale)"
            )
        },
        "value",
        "B177: flashinfer 1023, scales passed by position land in the wrong place",
    ),
    _mutant(
        "decode-scale-of-the-first-head-for-all",
        "decode_kernel",
        {"out *= tl.load(v_scale_ptr + kv_head * stride_v_scale)": ("out *= tl.load(v_scale_ptr)")},
        "value",
        "scales per head taken for one number",
    ),
    _mutant(
        "decode-bias-counts-from-the-length",
        "decode_kernel",
        {"(key - (length - 1)).to(tl.float32)": "(key - length).to(tl.float32)"},
        "value",
        "a constant bias is seen in the LSE only",
    ),
    _mutant(
        "decode-lse-in-base-2",
        "decode_kernel",
        {"    if not IS_SPLIT:\n        lse *= LN2\n": ""},
        "value",
        "vllm-flash-attention 87: LSE in another form",
    ),
    # The running softmax.
    _mutant(
        "softmax-nothing-minus-nothing",
        "advance",
        {'base = tl.where(m_new == float("-inf"), 0.0, m_new)': "base = m_new"},
        "value",
        "B184: vllm 39148, flashinfer 4051, -inf - (-inf) where nothing is visible",
    ),
    _mutant(
        "softmax-finite-minus-infinity",
        "unified_kernel",
        {
            'm = tl.full([TILE_ROWS], float("-inf"), tl.float32)': (
                "m = tl.full([TILE_ROWS], -5.0e4, tl.float32)"
            )
        },
        "value",
        "B188: flashinfer 4450, a sentinel of -5e4 hides scores below it",
    ),
    _mutant(
        "softmax-no-rescaling",
        "decode_kernel",
        {"acc * alpha[:, None], input_precision": "acc, input_precision"},
        "value",
        "what was accumulated keeps the old maximum",
    ),
    _mutant(
        "softmax-cap-loses-its-sign",
        "tanh",
        {"return tl.where(x < 0, -t, t)": "return t"},
        "value",
        "tanh written out",
    ),
    # Prefill.
    _mutant(
        "unified-not-causal",
        "unified_kernel",
        {
            "visible = is_key[None, :] & (key[None, :] <= position[:, None])": (
                "visible = is_key[None, :] & (key[None, :] <= position[:, None] + 1)"
            )
        },
        "value laws",
        "a query sees the next one",
    ),
    _mutant(
        "unified-window-of-the-tile",
        "unified_kernel",
        {"visible = visible & (key[None, :] > position[:, None] - window)": "visible = visible"},
        "value",
        "B183: sglang 31501, old keys attended in paged prefill",
    ),
    _mutant(
        "unified-forgets-the-past",
        "unified_kernel",
        {"position = length - queries + query": "position = query"},
        "value laws",
        "chunked prefill: positions counted from the chunk",
    ),
    _mutant(
        "unified-writes-past-its-sequence",
        "unified_kernel",
        {
            "is_row = (row < TILE_TOKENS * GROUP) & (query < queries)": (
                "is_row = row < TILE_TOKENS * GROUP"
            )
        },
        "sanitizer laws",
        "rows of the next sequence in the last tile of queries",
    ),
    _mutant(
        "unified-tile-of-the-wrong-sequence",
        "sequence_of",
        {"// TILE_TOKENS + middle <= tile:": "// TILE_TOKENS + middle < tile:"},
        "value sanitizer reads",
        "bisection off by one",
    ),
    # Latent attention.
    _mutant(
        "mla-ignores-the-rotary-part",
        "mla_kernel",
        {
            "products = tl.dot(q_rotary, tl.trans(k_rotary), products": (
                "products = tl.dot(q_rotary * 0.0, tl.trans(k_rotary), products"
            )
        },
        "value",
        "one of the two products left out",
    ),
    _mutant(
        "mla-stores-heads-that-are-not",
        "mla_kernel",
        {
            "mask=is_head[:, None] & is_latent[None, :],\n    )\n": (
                "mask=is_latent[None, :],\n    )\n"
            )
        },
        "value sanitizer laws",
        "heads not a multiple of the tile",
    ),
    _mutant(
        "mla-32-bit-offsets",
        "mla_kernel",
        {"block.to(tl.int64) * stride_block": "block.to(tl.int32) * stride_block"},
        "value sanitizer",
        "B171: vllm pull 47671, found in latent attention",
    ),
    # The cache.
    _mutant(
        "write-padding-slots",
        "write_kernel",
        {"    if slot < 0:\n        return\n": ""},
        "value sanitizer",
        "padded tokens have the slot -1",
    ),
    _mutant(
        "write-assumes-strides",
        "write_kernel",
        {
            "+ (slot // BLOCK_SIZE) * stride_block\n        + (slot % BLOCK_SIZE) * stride_slot": (
                "+ slot * stride_slot"
            )
        },
        "value sanitizer",
        "B189: flashinfer 527, append to caches that are views of one buffer",
    ),
    _mutant(
        "write-multiplies-by-the-scale",
        "write_kernel",
        {"            x *= factor[:, None]\n": "            x *= 1.0 / factor[:, None]\n"},
        "value",
        "B178: flashinfer 4979, scales applied the other way on one path",
    ),
    _mutant(
        "write-wraps-dimensions",
        "write_kernel",
        {" & (dim < HEAD_SIZE)[None, :]": ""},
        "value sanitizer",
        "head size not a power of two",
    ),
    _mutant(
        "write-32-bit-slots",
        "write_kernel",
        {"slot = tl.load(slots_ptr + token).to(tl.int64)": "slot = tl.load(slots_ptr + token)"},
        "value sanitizer",
        "B173: tokenspeed 501, aiter 4474, 32-bit slots",
    ),
    _mutant(
        "copy-assumes-one-layout",
        "copy_kernel",
        {
            "+ (slot * stride_target_slot + head * stride_target_head)[:, None]": (
                "+ (slot * stride_source_slot + head * stride_source_head)[:, None]"
            )
        },
        "value",
        "B190: vllm 17362, the copy assumes another layout",
    ),
    _mutant(
        "copy-runs-into-the-next-block",
        "copy_kernel",
        {"(row < ROWS)[:, None] & ": ""},
        "value sanitizer",
        "rows not a multiple of the tile",
    ),
    _mutant(
        "copy-takes-one-source-for-all",
        "copy_kernel",
        {"tl.load(source_ids_ptr + copy)": "tl.load(source_ids_ptr)"},
        "value",
        "every target gets the first source",
    ),
)
"""Every mutant; a test asserts that each of ``caught_by`` catches it."""


CHECKS: dict[str, str] = {
    "value": "the result within the derived bound of float64, all memory finite, as a usual test "
    "has it",
    "poison": "the same with NaN in every slot that may not be read, in result and workspace, and "
    'in masked-off lanes without `other=`; marked only where "value" is not',
    "sanitizer": "an access that may not be ([sanitizer.md](sanitizer.md))",
    "reads": "a visible key or value is read more or less often than once by each program that "
    "needs it",
    "laws": "a bitwise law, such as that a sequence alone gives what it gives in a batch",
}

PAGE = """\
# Faults planted in the kernels

{count} faults, each a replacement of exact text in the source of a kernel (`kernels/mutants.py`),
and the checks that catch it in the interpreter, without a GPU. `tests/kernels/test_mutants.py`
plants each one. `python -m kvproof.kernels.mutants` prints this page from what it finds: it runs
every check on every fault (some minutes), and fails where the list in the source says otherwise.

{checks}

{silent_count} of them give right values: {silent}.
On a GPU these work until the memory that they touch is another's, is unmapped, or holds a NaN.

{mutants}

Numbers with a B are bugs of public projects in the catalogue that the project was built from; each
names the issue or pull request.
"""


def page(found: Mapping[str, AbstractSet[str]]) -> str:
    """``docs/mutants.md``: the mutants and the checks that were ``found`` to catch each, by id."""
    silent = [f"`{mutant.id}`" for mutant in MUTANTS if "value" not in found[mutant.id]]
    checks = [("check", "what it is"), *CHECKS.items()]
    mutants = [("mutant", *CHECKS, "modelled on")]
    for mutant in MUTANTS:
        marks = ("x" if check in found[mutant.id] else " " for check in CHECKS)
        mutants.append((mutant.id, *marks, mutant.source))
    return PAGE.format(
        count=len(MUTANTS),
        checks=_markdown(checks),
        silent_count=len(silent),
        silent=", ".join(silent),
        mutants=_markdown(mutants),
    )


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def main() -> int:
    """Run every check on every mutant and print ``docs/mutants.md``; 1 if the list is wrong."""
    import_module("kvproof.kernels.interpreter").use_interpreter()
    code: int = import_module("kvproof.kernels.mutation_checks").print_page()
    return code


if __name__ == "__main__":
    sys.exit(main())

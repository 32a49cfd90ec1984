"""The compile check: what it reads is what is there, and each demand has a kernel that fails it.

Compiling needs a process in which Triton does not interpret, so that everything here runs in one
of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvproof.kernels.compiling import (
    TARGETS,
    Compilation,
    Figures,
    amd_load_bytes,
    amd_registers,
    buffers_in,
    nvidia_load_bytes,
    nvidia_registers,
)
from kvproof.kernels.variants import (
    EXCEPTIONS,
    Excepted,
    Variant,
    as_json,
    judged,
    table,
    unmet,
)

KEYS = {"kernel", "target", "dtype", "registers", "spills", "shared", "pipeline_depth", "ok"}
"""What tools rely on (design, section 7)."""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=600
    )


@cache
def command(*arguments: str) -> tuple[int, Any]:
    """Exit code and JSON of ``python -m kvproof.kernels compile --json``."""
    result = run_python("-m", "kvproof.kernels", "compile", "--json", *arguments)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


@cache
def probe() -> Any:
    result = run_python(str(Path(__file__).parent / "compile_probe.py"))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# The kernels themselves, on a part of the matrix.


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_kernels_meet_every_demand(target: str) -> None:
    code, document = command(
        *("--target", target, "--dtype", "bf16", "--features", "plain"),
        *("--kernel", "decode", "--kernel", "unified", "--kernel", "write", "--kernel", "copy"),
    )
    assert [v["problems"] for v in document["variants"] if not v["ok"]] == []
    assert (code, document["schema"], document["verdict"]) == (0, 1, "pass")
    kernels = {variant["kernel"] for variant in document["variants"]}
    expected = {"decode_kernel", "merge_kernel", "unified_kernel", "write_kernel", "copy_kernel"}
    assert kernels == expected
    for variant in document["variants"]:
        assert variant.keys() >= KEYS
        assert variant["registers"] > 0


def test_float8_is_loaded_ahead_too() -> None:
    code, document = command(
        *("--target", "sm_90", "--dtype", "e4m3", "--features", "plain", "--kernel", "decode")
    )
    assert code == 0
    decode = document["variants"][0]
    assert decode["kernel"] == "decode_kernel"
    assert decode["pipeline_depth"] >= 2


def test_what_a_target_cannot_do_is_told_and_excepted() -> None:
    code, document = command(
        *("--target", "sm_80", "--dtype", "e4m3", "--features", "plain", "--kernel", "decode")
    )
    assert code == 0
    (variant,) = document["variants"]
    assert "e4m3" in variant["note"]
    assert variant["registers"] == 0


# Each demand, with a kernel that fails it.


def test_spills_are_seen() -> None:
    found = probe()
    assert found["spills"] > 0
    assert found["amd spills"] > 0
    assert (found["no spills"], found["amd no spills"]) == (0, 0)


def test_a_refusal_is_told_with_its_reason() -> None:
    found = probe()
    assert found["refused"] == "break_kernel"
    assert "break" in found["error"].lower() or "unsupported" in found["error"].lower()


def test_block_ids_loaded_in_the_loop_hold_one_tile() -> None:
    found = probe()
    assert found["sound"] == []
    assert any("buffers of K and V" in problem for problem in found["in the loop"])


def test_an_odd_stride_costs_wide_loads() -> None:
    assert any("bytes at a time" in problem for problem in probe()["strided"])


SOUND = Figures(100, 0, 65536, (2, 2), 16, True)


@pytest.mark.parametrize(
    ("figures", "demand"),
    [
        (Figures(100, 8, 65536, (2, 2), 16, True), "no spills"),
        (Figures(100, 73, 65536, (2, 2), 16, True), "few spills"),
        (Figures(100, 0, 300_000, (2, 2), 16, True), "fits"),
        (Figures(100, 0, 65536, (2, 2), 8, True), "16-byte loads"),
        (Figures(100, 0, 65536, (2, 2), 4, True), "8-byte loads"),
        (Figures(100, 0, 65536, (2, 2), 16, False), "tensor cores"),
        (Figures(100, 0, 65536, (1, 2), 16, True), "two tiles in flight"),
        (Figures(100, 0, 65536, (2,), 16, True), "two tiles in flight"),
        (Figures(100, 0, 65536, (), 16, True), "two tiles in flight"),
        (None, "compiles"),
    ],
)
def test_each_demand_is_made(figures: Figures | None, demand: str) -> None:
    target = TARGETS["sm_90"]
    found = dict(unmet("decode_kernel", target, figures, "it is refused"))
    assert list(found) == [demand]
    assert dict(unmet("decode_kernel", target, SOUND, "")) == {}


def test_only_attention_is_to_load_widely_and_to_multiply() -> None:
    plain = Figures(20, 0, 0, (), 4, False)
    assert dict(unmet("copy_kernel", TARGETS["sm_90"], plain, "")) == {}


def test_latent_attention_has_one_buffer() -> None:
    single = Figures(100, 0, 65536, (2,), 16, True)
    assert dict(unmet("mla_kernel", TARGETS["sm_90"], single, "")) == {}


def test_a_refusal_is_no_pass() -> None:
    refused = Compilation("decode_kernel", error="no such instruction")
    variant = judged(refused, TARGETS["sm_90"], "bf16", "plain", 0.0)
    assert not variant.ok
    assert variant.problems == ("does not compile: no such instruction",)
    assert "does not compile" in table([variant])
    assert as_json([variant])["verdict"] == "fail"


def test_an_exception_covers_what_it_names_and_no_more() -> None:
    excepted = Excepted("fits", "why", kernels=frozenset(("a",)), dtypes=frozenset(("bf16",)))
    assert excepted.covers("fits", "a", "sm_90", "bf16", "plain")
    assert not excepted.covers("fits", "b", "sm_90", "bf16", "plain")
    assert not excepted.covers("fits", "a", "sm_90", "fp32", "plain")
    assert not excepted.covers("no spills", "a", "sm_90", "bf16", "plain")


def test_every_exception_names_its_reason() -> None:
    for excepted in EXCEPTIONS:
        assert len(excepted.reason) > 10
        assert excepted.targets or excepted.dtypes or excepted.features


# Reading.


def test_buffers_are_read_from_the_pipeliner() -> None:
    text = """
    %k = ttg.local_alloc : () -> !ttg.memdesc<3x64x128xbf16, #shared, #smem, mutable> loc(#l)
    %v = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, #shared1, #smem, mutable> loc(#l)
    %q = ttg.local_alloc %x : (tensor<16x128xbf16>) -> !ttg.memdesc<16x128xbf16, #shared, #smem>
    ttg.local_dealloc %v : !ttg.memdesc<2x64x128xbf16, #shared, #smem, mutable> loc(#l)
    """
    assert buffers_in(text) == (3, 2)
    assert Figures(1, 0, 0, buffers_in(text)).pipeline_depth == 2
    assert Figures(1, 0, 0).pipeline_depth == 1


def test_resources_are_read_from_cuobjdump() -> None:
    usage = "Function f:\n  REG:120 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:680 TEXTURE:0"
    assert nvidia_registers(usage) == (120, 24)
    with pytest.raises(RuntimeError, match="REG"):
        nvidia_registers("cuobjdump info: no kernel")


def test_loads_are_read_from_ptx() -> None:
    copies = (
        "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\n"
        "cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x8, %r2;\n"
    )
    assert nvidia_load_bytes(copies) == 8
    assert nvidia_load_bytes("ld.global.v4.b32 { %r1, %r2 }, [ %rd1 + 0 ];") == 16
    assert nvidia_load_bytes("@%p1 ld.global.b16 { %rs1 }, [ %rd1 + 0 ];") == 2
    mixed = "ld.global.v4.b32 { %r1 };\n" + "ld.global.b16 { %rs1 };\n" * 9
    assert nvidia_load_bytes(mixed) == 2
    assert nvidia_load_bytes("st.global.v4.b32 [ %rd1 + 0 ], { %r1 };") == 0


def test_amd_assembly_is_read() -> None:
    text = ".vgpr_count: 131\n.vgpr_spill_count: 3\n.sgpr_spill_count: 4\n"
    assert amd_registers(text) == (131, 3, 4)
    wide = "buffer_load_dwordx4 v[0:3], v4\n" * 2 + "global_load_dword v1, v2\n" * 4
    assert amd_load_bytes(wide) == 16
    assert amd_load_bytes("global_load_ushort v1, v2\nbuffer_load_short_d16_hi v1, v2") == 2
    assert amd_load_bytes("global_store_dword v1, v2") == 0


# The command.


def test_bad_usage_is_one_line_and_2() -> None:
    result = run_python("-m", "kvproof.kernels", "compile", "--target", "sm_1")
    assert result.returncode == 2
    assert "no target 'sm_1'; there are sm_80, " in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_table_has_a_line_for_each_variant() -> None:
    variants = [
        Variant("decode_kernel", "sm_90", "bf16", "plain", SOUND, (), "", 0.1),
        Variant("decode_kernel", "sm_80", "bf16", "plain", SOUND, ("12 spilled",), "", 0.1),
    ]
    lines = table(variants).splitlines()
    assert lines[0].split() == [
        *("kernel", "target", "dtype", "features"),
        *("registers", "spills", "shared", "depth", "load"),
    ]
    assert lines[1].split()[-1] == "ok"
    assert lines[2].endswith("12 spilled")

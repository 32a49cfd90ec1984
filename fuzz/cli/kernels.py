"""``kvproof kernels``: Triton paged-attention kernels, tested, compiled and timed.

Needs torch and triton (``pip install 'kvproof[kernels]'``); nothing else of kvproof does, so they
are imported only when a command runs.  The work is that of ``python -m kvproof.kernels``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Annotated, NoReturn

import typer

from kvproof.fuzz.cli.output import EXIT_UNKNOWN, JsonOption
from kvproof.kernels.__main__ import main

app = typer.Typer(no_args_is_help=True, help="Triton paged-attention kernels: test, compile, time.")

COMPILER = [sys.executable, "-P", "-m", "kvproof.kernels", "compile"]
"""``-P``: the folder that the command is typed in is not searched for modules."""


@app.command("check")
def check(
    examples: Annotated[int, typer.Option(min=1, help="Examples per property.")] = 50,
    seed: Annotated[int, typer.Option(help="Where random choices start.")] = 0,
    only: Annotated[str, typer.Option(help="Only checks whose name contains this.")] = "",
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Interpret, even where there is a GPU.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Test the kernels: compiled where there is a GPU, interpreted where there is none.

    Example: [bold]kvproof kernels check --examples 100[/]
    """
    options = ["--examples", str(examples), "--seed", str(seed), f"--only={only}"]
    _leave(main(["check", *options, *_flags(cpu=cpu, json=as_json)]))


@app.command("compile")
def compile_(
    kernel: Annotated[
        list[str] | None, typer.Option(help="decode, unified, mla, write or copy.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="sm_80, sm_90, sm_100, sm_120 or gfx942.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, fp16, bf16, e4m3 or e5m2.")] = None,
    features: Annotated[list[str] | None, typer.Option(help="plain, all, wide or odd.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile every kernel for every GPU, without one, and hold the results to the demands.

    Each option may be given more than once. All variants take some minutes.

    Example: [bold]kvproof kernels compile --target sm_90 --dtype bf16[/]
    """
    named = [*_each("kernel", kernel), *_each("target", target), *_each("dtype", dtype)]
    options = [*named, *_each("features", features), *_flags(json=as_json)]
    # A process compiles or interprets, as Triton decides when it is imported: take a new one.
    done = subprocess.run([*COMPILER, *options], stdout=subprocess.PIPE, text=True, check=False)
    sys.stdout.write(done.stdout)
    if done.returncode < 0:
        typer.echo(f"kvproof kernels: the compiler died of signal {-done.returncode}", err=True)
        _leave(EXIT_UNKNOWN)
    _leave(done.returncode)


@app.command("bench")
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="A few sizes only, about a minute.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time the kernels on a GPU, against a copy within its memory and PyTorch's SDPA.

    Example: [bold]kvproof kernels bench --quick[/]
    """
    _leave(main(["bench", *_flags(quick=quick, json=as_json)]))


def _each(name: str, values: Iterable[str] | None) -> list[str]:
    return [f"--{name}={value}" for value in values or ()]


def _flags(**flags: bool) -> list[str]:
    return [f"--{name}" for name, is_set in flags.items() if is_set]


def _leave(code: int) -> NoReturn:
    raise typer.Exit(code)

"""``python -m kvproof.kernels check|compile|bench``: needs torch, triton, numpy and hypothesis.

Exit codes: 0 pass; 1 a demand is not met; 2 bad usage, or what is needed is not there; 3 unknown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

PASS, FAIL, USAGE, UNKNOWN = 0, 1, 2, 3
CLOSED_PIPE = 141
INSTALL = "pip install 'kvproof[kernels]'"


class Unusable(Exception):
    """The command cannot run here; the message says what is missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.  A crash is never a verdict."""
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except Unusable as error:
        print(f"kvproof kernels: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader of our output went away, as `head` does: there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except Exception as error:
        traceback.print_exc()
        print(f"kvproof kernels: internal error, please report it: {error!r}", file=sys.stderr)
        return UNKNOWN
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvproof kernels", description="Triton paged-attention kernels: test, compile, time."
    )
    commands = parser.add_subparsers(required=True, metavar="check|compile|bench")
    _add_check(commands)
    _add_compile(commands)
    _add_bench(commands)
    return parser


def _add_command(commands: Any, name: str, summary: str, example: str, run: Any) -> Any:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example: kvproof kernels {example}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.set_defaults(run=run)
    return parser


def _say(text: str) -> None:
    """Progress, for a person at a terminal only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _print_json(document: object) -> None:
    print(json.dumps(document, indent=2))


def _need_torch() -> Any:
    """torch, once it is certain that Triton is there, too."""
    try:
        torch = import_module("torch")
        import_module("triton")
    except ModuleNotFoundError as error:
        raise Unusable(f"{error.name} is not installed: {INSTALL}") from error
    return torch


def _need_compiler() -> Any:
    """torch, with Triton about to compile, whatever the environment says of interpreting."""
    os.environ.pop("TRITON_INTERPRET", None)
    return _need_torch()


def _refuse_interpreter() -> None:
    """Triton was imported before, by a program that calls ``main``: it is too late to compile."""
    if import_module("kvproof.kernels.interpreter").is_interpreting():
        raise Unusable("Triton interprets in this process; compile in one of its own")


# compile


def _add_compile(commands: Any) -> None:
    parser = _add_command(
        commands,
        "compile",
        "Compile every kernel for every GPU, without one, and hold the results to the demands.",
        "compile --target sm_90 --dtype bf16",
        _compile,
    )
    parser.add_argument("--kernel", action="append", help="decode, unified, mla, write or copy")
    parser.add_argument("--target", action="append", help="sm_80, sm_90, sm_100, sm_120, gfx942")
    parser.add_argument("--dtype", action="append", help="fp32, fp16, bf16, e4m3 or e5m2")
    parser.add_argument("--features", action="append", help="plain, all, wide or odd")


def _compile(parsed: argparse.Namespace) -> int:
    _need_compiler()
    _refuse_interpreter()
    variants = import_module("kvproof.kernels.variants")
    chosen = {
        "kernels": _chosen(parsed.kernel, variants.FEATURES_OF, "kernel"),
        "targets": _chosen(parsed.target, variants.TARGETS, "target"),
        "dtypes": _chosen(parsed.dtype, variants.DTYPES, "dtype"),
        "features": _chosen(parsed.features, variants.FEATURES, "set of features"),
    }
    done = []
    for variant in variants.compile_variants(**chosen):
        done.append(variant)
        _say(f"{variant.kernel} {variant.target} {variant.dtype} {variant.features}")
    if parsed.json:
        _print_json(variants.as_json(done))
    else:
        print(variants.table(done))
    return PASS if all(variant.ok for variant in done) else FAIL


def _chosen(named: list[str] | None, known: Any, what: str) -> tuple[str, ...]:
    for name in named or ():
        if name not in known:
            raise Unusable(f"no {what} '{name}'; there are {', '.join(known)}")
    return tuple(named or known)


# bench


def _add_bench(commands: Any) -> None:
    parser = _add_command(
        commands,
        "bench",
        "Time the kernels on a GPU, against a copy within its memory and PyTorch's SDPA.",
        "bench --quick",
        _bench,
    )
    parser.add_argument("--quick", action="store_true", help="a few sizes only, about a minute")


def _bench(parsed: argparse.Namespace) -> int:
    _need_compiler()
    bench = import_module("kvproof.kernels.bench")
    try:
        timer = bench.gpu_timer()
    except bench.NoGpu as error:
        raise Unusable(str(error)) from error
    _refuse_interpreter()
    sizes = {"contexts": (8 << 10,), "prompts": ((8, 2048),)} if parsed.quick else {}
    report = bench.run(timer, on_result=lambda result: _say(str(result)), **sizes)
    if parsed.json:
        _print_json(report.as_json())
    else:
        print(bench.table(report))
    return FAIL if report.goal_met is False else PASS


# check


def _add_check(commands: Any) -> None:
    parser = _add_command(
        commands,
        "check",
        "Test the kernels: compiled where there is a GPU, interpreted where there is none.",
        "check --examples 100",
        _check,
    )
    parser.add_argument("--examples", type=int, default=50, help="examples per property (50)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--only", default="", help="only checks whose name contains this")
    parser.add_argument("--cpu", action="store_true", help="interpret, even where there is a GPU")


def _check(parsed: argparse.Namespace) -> int:
    if parsed.examples < 1:
        raise Unusable(f"--examples must be 1 or more, not {parsed.examples}")
    on_gpu = _need_torch_for_check(parsed.cpu)
    checks = import_module("kvproof.kernels.checks")
    chosen = [*checks.all_checks()]
    if not on_gpu:
        chosen += import_module("kvproof.kernels.watched").watched_checks()
    chosen = [check for check in chosen if parsed.only in check.name]
    if not chosen:
        raise Unusable(f"no check has '{parsed.only}' in its name")
    plan = checks.Plan("cuda" if on_gpu else "cpu", parsed.examples, parsed.seed)
    outcomes = [_outcome(check, plan, parsed.json) for check in chosen]
    verdict = _verdict([outcome["result"] for outcome in outcomes])
    if parsed.json:
        document = {"schema": 1, "verdict": verdict, "device": plan.device, "seed": plan.seed}
        _print_json({**document, "checks": outcomes})
    else:
        print(f"{verdict}: {len(outcomes)} checks on {plan.device}, seed {plan.seed}")
    return {"pass": PASS, "fail": FAIL, "unknown": UNKNOWN}[verdict]


def _need_torch_for_check(cpu: bool) -> bool:
    """Have kernels compiled or interpreted; returns whether they run on a GPU."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # tiles are tiny: threads would only wait for each other
    try:
        on_gpu = not cpu and import_module("torch").cuda.is_available()
    except ModuleNotFoundError:
        on_gpu = False  # the next line says what is missing
    if on_gpu:
        _need_compiler()
        _refuse_interpreter()
    else:
        interpreter = import_module("kvproof.kernels.interpreter")
        try:
            interpreter.use_interpreter()
        except interpreter.InterpreterError as error:
            missing = isinstance(error.__cause__, ModuleNotFoundError)
            raise Unusable(f"{error}: {INSTALL}" if missing else str(error)) from error
    _need_torch().set_num_threads(1)
    return bool(on_gpu)


def _outcome(check: Any, plan: Any, quiet: bool) -> dict[str, Any]:
    """Run one check.  A crash is no verdict: only an AssertionError says that a check fails."""
    start = time.perf_counter()
    try:
        result, remark = "pass", check.run(plan)
    except AssertionError as error:
        result, remark = "fail", _told(error)
    except Exception as error:
        result, remark = "unknown", f"{type(error).__name__}: {_told(error)}"
    seconds = time.perf_counter() - start
    if not quiet:
        print(f"{result:7} {check.name} ({seconds:.1f} s): {remark}", flush=True)
    outcome = {"name": check.name, "claim": check.claim, "result": result, "remark": remark}
    return {**outcome, "seconds": round(seconds, 2)}


def _told(error: BaseException) -> str:
    """The message, and what Hypothesis adds to it: the case that fails."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _verdict(results: Sequence[str]) -> str:
    return next((worst for worst in ("fail", "unknown") if worst in results), "pass")


if __name__ == "__main__":
    sys.exit(main())

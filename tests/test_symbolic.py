"""Block arithmetic and the pool's protocol, proved by CrossHair; and whether the proof can fail.

CrossHair costs seconds, so many functions are put to it at once (``proof``, ``attack``).
"""

import ast
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvproof.engine import arithmetic

SYMBOLIC = Path(__file__).parent / "symbolic"


def load(name: str) -> ModuleType:
    """A module of ``tests/symbolic``, to which no import path leads."""
    spec = importlib.util.spec_from_file_location(f"{__name__}_{name}", SYMBOLIC / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look it up
    spec.loader.exec_module(module)
    return module


gate = load("gate")
planted = load("planted")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("crosshair") is None,
        reason="crosshair-tool is not installed; it is in the test extra",
    ),
]

ARITHMETIC = Path(arithmetic.__file__)
STEPS = SYMBOLIC / "steps.py"

# The conditions that must be seen and confirmed, by function.
LISTED = {
    gate.Target("kvproof.engine.arithmetic", ARITHMETIC, function): conditions
    for function, conditions in {
        "blocks_needed": 1,
        "full_blocks": 1,
        "slot": 2,
        "hit_tokens": 3,
        "copy_needed": 1,
        "blocks_to_take": 4,
        "capacity_blocks": 2,
    }.items()
} | {
    gate.Target("steps", STEPS, function): conditions
    for function, conditions in {
        "allocate": 1,
        "release": 1,
        "share": 2,
        "admit": 3,
        "publish": 2,
        "evict": 2,
        "fork": 2,
        "write": 2,
    }.items()
}

FAULTS = [(ARITHMETIC, fault) for fault in planted.ARITHMETIC] + [
    (STEPS, fault) for fault in planted.STEPS
]

# Contracts of ``blocks_needed`` that prove nothing: what the gate complains of, the right text
# and the wrong one.
BROKEN = {
    "misspelt_post": ("1 conditions listed, 0 found", "post: ", "psot: "),
    "misspelt_return": ("not seen", "(__return__ - 1)", "(__retrun__ - 1)"),
    "misspelt_pre": ("refuted", "pre: ", "rpe: "),
    "misspelt_argument": ("not seen", "pre: tokens", "pre: tokesn"),
    "unmeetable_pre": ("not seen", "pre: tokens >= 0", "pre: tokens >= 0 > tokens"),
    "broken_syntax": ("not seen", "tokens <= __return__", "tokens <== __return__"),
}


def variant(folder: Path, source: Path, name: str, function: str, right: str, wrong: str) -> Any:
    """A target in a copy of a source file, with one piece of one function replaced.

    Pools are of two blocks at most there: a run that breaks one of those breaks the claim about
    three, and the conditions that a fault leaves alone are confirmed in a fraction of the time.
    """
    text = planted.rewrite(source.read_text(encoding="utf-8"), function, right, wrong)
    file = folder / f"{name}.py"
    file.write_text(text.replace("\nBLOCKS = 3\n", "\nBLOCKS = 2\n"), encoding="utf-8")
    return gate.Target(name, file, function)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The target of each planted fault and of each broken contract, by name."""
    folder = tmp_path_factory.mktemp("variants")
    faulty = {
        fault.name: variant(folder, source, fault.name, fault.function, fault.right, fault.wrong)
        for source, fault in FAULTS
    }
    broken = {
        name: variant(folder, ARITHMETIC, name, "blocks_needed", right, wrong)
        for name, (_, right, wrong) in BROKEN.items()
    }
    return faulty | broken


def examined(targets: Iterable[Any]) -> dict[Any, list[Any]]:
    """What CrossHair says, by target."""
    said: dict[Any, list[Any]] = {target: [] for target in targets}
    for finding in gate.examine([*said]):
        said[finding.target].append(finding)
    return said


@pytest.fixture(scope="module")
def proof() -> dict[Any, list[Any]]:
    """Findings on the right versions; apart from the variants, which a mistake here may break."""
    return examined(LISTED)


@pytest.fixture(scope="module")
def attack(variants: dict[str, Any]) -> dict[Any, list[Any]]:
    """Findings on the variants."""
    return examined(variants.values())


@pytest.mark.parametrize("target", LISTED, ids=str)
def test_every_condition_is_confirmed_over_all_paths(
    target: Any, proof: dict[Any, list[Any]]
) -> None:
    assert gate.unproved(proof[target], {target: LISTED[target]}) == []


@pytest.mark.parametrize("file", [ARITHMETIC, STEPS], ids=lambda file: file.stem)
def test_every_contract_is_listed(file: Path) -> None:
    functions = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)]
    # In the arithmetic that is every function; the steps have helpers without a contract.
    bound = {f.name for f in functions if file == ARITHMETIC or "post:" in ast.unparse(f)}
    assert bound == {target.function for target in LISTED if target.file == file}


@pytest.mark.parametrize("fault", [fault for _, fault in FAULTS], ids=lambda fault: fault.name)
def test_planted_fault_is_refuted(
    fault: Any, variants: dict[str, Any], attack: dict[Any, list[Any]]
) -> None:
    said = attack[variants[fault.name]]
    (right,) = (target for target in LISTED if target.function == fault.function)
    # Refuted by the contract of the right version, not by one that the replacement touched.
    assert [finding.contract for finding in said] == [*gate.conditions(right).values()]
    assert "refuted" in {finding.verdict for finding in said}, [*map(str, said)]


def test_every_condition_refutes_some_planted_fault(
    variants: dict[str, Any], attack: dict[Any, list[Any]]
) -> None:
    refuting = {
        (fault.function, finding.contract)
        for _, fault in FAULTS
        for finding in attack[variants[fault.name]]
        if finding.verdict == "refuted"
    }
    conditions = {
        (t.function, contract) for t in LISTED for contract in gate.conditions(t).values()
    }
    assert conditions - refuting == set()


@pytest.mark.parametrize("name", BROKEN)
def test_gate_fails_on_a_broken_contract(
    name: str, variants: dict[str, Any], attack: dict[Any, list[Any]]
) -> None:
    complaints = gate.unproved(attack[variants[name]], {variants[name]: 1})
    assert len(complaints) == 1
    assert BROKEN[name][0] in complaints[0]


def test_gate_fails_where_paths_never_end(tmp_path: Path) -> None:
    bound, none = "== len(pool.refs) <= BLOCKS", "== len(pool.refs)"
    file = variant(tmp_path, STEPS, "unbounded", "sound", bound, none).file
    target = gate.Target("unbounded", file, "release")
    (finding,) = gate.examine([target], condition_seconds=1.0)
    assert finding.verdict == "not confirmed"
    assert gate.unproved([finding], {target: 1}) == [str(finding)]


def test_gate_fails_when_time_is_up() -> None:
    target = next(iter(LISTED))
    said = gate.examine([target], overall_seconds=0.01)
    assert [finding.verdict for finding in said] == ["not seen"]


def test_gate_fails_on_a_target_that_is_not_importable(tmp_path: Path) -> None:
    broken = variant(
        tmp_path, ARITHMETIC, "broken", "blocks_needed", "tokens: int,", "tokens: missing,"
    )
    assert [finding.verdict for finding in gate.examine([broken])] == ["not seen"]

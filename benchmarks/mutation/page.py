"""The page: what the score of mutants is, what is estimated, and each survivor that matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from results import MUTATED, OfFile, Survivor, explanations, of_files, reason
from shares import wilson


class Score(NamedTuple):
    """Of the mutants of some files: how many matter and how many are killed, with the least and
    the most that may be if that is an estimate."""

    trials: float
    killed: float
    least: float
    most: float

    def __add__(self, other: tuple[float, ...]) -> Score:  # type: ignore[override]
        return Score(*map(sum, zip(self, other, strict=True)))

    def __str__(self) -> str:
        if not self.trials:
            return "–"
        share, low, high = (round(100 * one / self.trials) for one in self[1:])
        return f"{share} %" if self.least == self.most else f"{share} % ({low} to {high} %)"


def score(files: Sequence[OfFile]) -> Score:
    """Of those that were run, as it is now."""
    trials = sum(one.trials for one in files)
    killed = trials - sum(len(one.telling) for one in files)
    return Score(trials, killed, killed, killed)


def estimate(files: Sequence[OfFile]) -> Score:
    """Of those that were not run, by the first runs of those that were drawn from the same."""
    total = Score(0, 0, 0, 0)
    for top in MUTATED:
        total += _estimate([one for one in files if one.sampled and one.path.startswith(top)])
    return total


def _estimate(files: Sequence[OfFile]) -> Score:
    trials, killed = sum(one.first_trials for one in files), sum(one.first_killed for one in files)
    if not trials:
        return Score(0, 0, 0, 0)
    others = sum(one.mutants - one.run for one in files)
    others_that_matter = others * trials / sum(len(one.first) for one in files)
    # Of those drawn and not run it is open whether they survive: they live long.
    open_ones = sum(one.counts["not run"] for one in files)
    drawn_in_all = trials + open_ones
    least, _ = wilson(killed, drawn_in_all)
    _, most = wilson(killed + open_ones, drawn_in_all)
    shares = (1, (killed + open_ones / 2) / drawn_in_all, least, most)
    return Score(*(others_that_matter * share for share in shares))


def page(works: Sequence[Path]) -> Iterator[str]:
    """The results in Markdown."""
    explained = explanations()
    files = [one for one in of_files(works) if one.mutants]
    whole, sampled = ([one for one in files if one.sampled == asked] for asked in (False, True))
    yield "# Mutation score"
    yield ""
    more = ", and with `--sample N` what is sampled" if sampled else ""
    yield f"Written by `python benchmarks/mutation/run.py --work FOLDER --page FILE.md`{more},"
    commits = [line for work in works for line in (work / "commits").read_text().splitlines()]
    yield f"at commit {', '.join(dict.fromkeys(commits))}."
    yield ""
    yield (
        "A mutant is a copy of a file with one expression changed.  It is killed by the tests of "
        "what is mutated, among them those that earlier survivors led to "
        "(`tests/test_*mutants.py`), by the seeded loop from fixed seeds "
        "(`benchmarks/mutation/kill/`), which must stay silent on what is right, and, for the "
        "checks, by one small case for each seeded fault, which must still be seen at the same "
        "operation and as the same property.  *Ended by force* (a time limit: it ran for ever) "
        "counts as killed.  A score leaves out survivors that only change the words of a "
        "message.  Where several commits are named, mutants of functions that did "
        "not change were not run again at the later ones."
    )
    yield ""
    yield from _totals(files)
    yield from _table("Run whole", whole)
    yield from _table("Sampled", sampled)
    open_ones = sum(
        reason(survivor, explained.get(one.path, [])) is None
        for one in files
        for survivor in one.telling
    )
    not_run = sum(one.counts["not run"] for one in files)
    yield f"Open: {open_ones} that survive and are not explained, {not_run} not run."
    yield ""
    for one in files:
        yield from _of_file(one.path, one.telling, explained.get(one.path, []))


def _totals(files: Sequence[OfFile]) -> Iterator[str]:
    yield (
        "| | files | mutants | run | survived | of these wording | score of what was run "
        "| of others | of all |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for tops in (*([top] for top in MUTATED), MUTATED):
        some = [one for one in files if one.path.startswith(tuple(tops))]
        survived = sum(len(one.survivors) for one in some)
        wording = survived - sum(len(one.telling) for one in some)
        cells = (
            " and ".join(f"{top}/" for top in tops),
            f"{len(some)}",
            f"{sum(one.mutants for one in some):,}",
            f"{sum(one.run for one in some):,}",
            f"{survived}",
            f"{wording}",
            f"{score(some)}",
            f"{estimate(some)}",
            f"{score(some) + estimate(some)}",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    sampled = [one for one in files if one.sampled]
    if sampled:
        unknown = sum(one.run - len(one.first) for one in sampled)
        yield (
            "Some files are run whole; of the others a sample was drawn: those whose names have "
            "the least digests, so that no one chooses them and a larger sample contains a smaller "
            "one.  Survivors lead to tests that kill them, after which the score of those that "
            "were run says nothing of others.  So others are estimated by what the mutants of the "
            "sample did when they were run *first*, before any test was written for them; there "
            "are more tests now, so that it is rather too low.  In brackets: Wilson's interval, of "
            "95 %, wherever those that were drawn and not run would lie; before them, half of "
            "these count as killed.  *Of all* is the sum: what was run, as it is now, and the "
            "others as estimated."
        )
        yield ""
        if unknown:
            yield (
                f"Of {unknown} of the sample the first result was not kept: they are no part of "
                "the estimate."
            )
            yield ""


def _table(title: str, files: Sequence[OfFile]) -> Iterator[str]:
    if not files:
        return
    first = " at the first run |" if files[0].sampled else ""
    yield f"## {title}"
    yield ""
    yield (
        "| file | mutants | run | killed | ended by force | survived | of these wording | score |"
        f"{first}"
    )
    yield f"|---|---|---|---|---|---|---|---|{'---|' if first else ''}"
    for one in files:
        yield _row(one.path, [one])
    yield _row("all", files)
    yield ""


def _row(name: str, files: Sequence[OfFile]) -> str:
    counts = sum((one.counts for one in files), Counter[str]())
    mutants, run = sum(one.mutants for one in files), sum(one.run for one in files)
    taken = f"{counts.total()} of {mutants}" if files[0].sampled else f"{mutants}"
    survived = sum(len(one.survivors) for one in files)
    wording = survived - sum(len(one.telling) for one in files)
    cells = [taken, run, counts["killed"], counts["ended by force"], survived, wording]
    cells += [score(files), *([_at_first(files)] if files[0].sampled else [])]
    return f"| {name} | {' | '.join(map(str, cells))} |"


def _at_first(files: Sequence[OfFile]) -> str:
    trials, killed = sum(one.first_trials for one in files), sum(one.first_killed for one in files)
    return f"{killed} of {trials}, {round(100 * killed / trials)} %" if trials else "–"


def _of_file(
    path: str, survived: Sequence[Survivor], explained: Sequence[dict[str, Any]]
) -> Iterator[str]:
    if not survived:
        return
    yield f"## {path}"
    yield ""
    for one in survived:
        why = reason(one, explained) or "**not explained**"
        yield f"- `{one.function}`: `{one.before}` → `{one.after}`: {why}"
    yield ""

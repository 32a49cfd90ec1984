"""The template of a subject, the helper that it stands on, and the page that explains them."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvproof.fuzz.campaign import check_subject
from kvproof.fuzz.conformance import RUNS
from kvproof.fuzz.search import abilities, search
from kvproof.fuzz.swarm import draw_run
from kvproof.fuzz.verdicts import judge
from kvproof.invariants.errors import InputError
from kvproof.invariants.events import (
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestGrown,
    RequestPreempted,
    RequestResumed,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Media,
    Operation,
    Preempt,
    Reset,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    NOT_LAUNCHED,
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    SKIPPED,
    TOO_MANY_REQUESTS,
)
from kvproof.invariants.subject import Configuration, Semantics, Subject
from kvproof.invariants.view import View
from kvproof.stateful_tests.adapter import Adapter, AdapterView, Refused, Request
from kvproof.stateful_tests.conformance import Witness
from kvproof.stateful_tests.examples import template
from kvproof.stateful_tests.examples.template import Template
from kvproof.stateful_tests.examples.tiny_cache import Cache
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.totals import Totals

NAME = "kvproof.stateful_tests.examples.template:Template"


def build(blocks: int = 6, **more: Any) -> Template:
    return Template(Configuration(blocks=blocks, block_size=4, **more))


def admit(length: int, source: int = 1, **more: Any) -> Admit:
    return Admit((Segment(source, length),), **more)


def told(subject: Template, *operations: Operation) -> list[Event]:
    """Do these, and say what the last one told."""
    for operation in operations:
        subject.drain_events()
        assert subject.apply(operation).status == "done"
    return list(subject.drain_events())


# -- the template ----------------------------------------------------------------------------------


def test_it_is_short_and_fits_the_protocols() -> None:
    assert len(Path(template.__file__).read_text().splitlines()) < 80
    assert isinstance(build(), Subject)
    assert isinstance(build().view(), View)


def test_the_loop_passes_it() -> None:
    totals = Totals()
    assert search(NAME, "template", seconds=120, totals=totals, runs_max=150) is None
    judgement = judge(
        build(),
        totals.operations,
        totals.goals,
        checked=totals.checked,
        failed=False,
        problems=tuple(totals.problems),
    )
    assert judgement.verdict == "pass", judgement.reasons


def test_check_finds_nothing_in_it(tmp_path: Path) -> None:
    report = check_subject(NAME, runs=60, seed="template", out=tmp_path)
    assert report.finding is None
    assert report.loop.ops > 0
    assert report.machine.ops > 0
    assert report.total.problems == []


class ForgetsToForget(Cache):
    def forget(self, blocks: Any) -> None:
        for block in blocks:
            self.key_of.pop(block, None)


class KeepsTheHead(Cache):
    def give_back(self, table: list[int]) -> None:
        del table[:1]
        super().give_back(table)


class CountsNoHits(Cache):
    def take(self, table: list[int], tokens: int, hits: Sequence[int] = ()) -> bool:
        done = super().take(table, tokens, hits)
        for block in hits if done else ():
            self.refs[block] = 1
        return done


@pytest.mark.parametrize(
    ("cache", "properties"),
    [
        (ForgetsToForget, {"VALID"}),
        (KeepsTheHead, {"CONS", "REF", "QUIES"}),
        (CountsNoHits, {"REF", "CONS"}),
    ],
)
def test_a_fault_of_the_engine_is_found_through_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: type[Cache], properties: set[str]
) -> None:
    monkeypatch.setattr(template, "Cache", cache)
    report = check_subject(NAME, seconds=30, seed="template", out=tmp_path)
    assert report.finding is not None
    assert report.finding.violation.property in properties
    assert len(report.finding.case.operations) <= 8


# -- what the helper tells -------------------------------------------------------------------------


def test_events_of_a_life() -> None:
    subject = build()
    assert told(subject, admit(6)) == [
        BlocksAllocated(0, 0, 0, [1, 2]),
        RequestAdmitted(0, 6, 0),
    ]
    assert [type(event) for event in told(subject, Launch())] == [StepLaunched]
    retired, published = told(subject, Retire())
    assert isinstance(retired, StepRetired)
    assert isinstance(published, BlocksPublished)
    assert (published.row, published.blocks) == (0, [1])
    assert told(subject, Grow(0, 3)) == [BlocksAllocated(0, 0, 2, [3]), RequestGrown(0, 3)]
    told(subject, Launch(), Retire())
    assert told(subject, Preempt(0)) == [BlocksReleased(0, 0, [3, 2, 1]), RequestPreempted(0)]
    assert told(subject, Resume(0)) == [
        BlocksReused(0, 0, 0, [1, 2]),
        BlocksAllocated(0, 0, 2, [3]),
        RequestResumed(0, 8),
    ]
    told(subject, Launch(), Retire())
    assert told(subject, Finish(0)) == [BlocksReleased(0, 0, [3, 2, 1]), RequestFinished(0)]


def test_an_eviction_is_told_before_what_takes_its_block() -> None:
    subject = build(blocks=2)
    told(subject, admit(8), Launch(), Retire(), Finish(0))
    evicted, allocated, _ = told(subject, admit(4, source=2))
    assert isinstance(evicted, BlocksEvicted)
    assert (evicted.blocks, evicted.cause) == ([2], "pressure")
    assert allocated == BlocksAllocated(0, 1, 0, [2])
    told(subject, Launch(), Retire())
    assert [e.cause for e in told(subject, Evict(1)) if isinstance(e, BlocksEvicted)] == ["request"]


def test_the_order_of_release_is_told_as_it_is_seen() -> None:
    class HeadFirst(Template):
        def release(self, request: Request) -> None:
            self.tables[request.number].reverse()
            super().release(request)

    subject = HeadFirst(Configuration(blocks=6, block_size=4))
    events = told(subject, admit(8), Launch(), Retire(), Finish(0))
    assert events[0] == BlocksReleased(0, 0, [1, 2])


class PublishesAtAdmission(Template):
    semantics = Semantics(
        publishes="at_allocation", fences_releases=False, chunks=False, slots=False, swaps=False
    )

    def admit(self, request: Request) -> int:
        cached = super().admit(request)
        self.cache.publish(self.tables[request.number], request.marked_tokens)
        return cached


def test_a_block_may_be_published_again_under_the_key_that_it_had() -> None:
    subject = PublishesAtAdmission(Configuration(blocks=1, block_size=4))
    told(subject, admit(4), Launch(), Retire(), Finish(0))
    kinds = [type(event) for event in told(subject, admit(4))]
    assert kinds == [BlocksEvicted, BlocksAllocated, BlocksPublished, RequestAdmitted]
    harness = Harness(PublishesAtAdmission(Configuration(blocks=1, block_size=4)), audit_interval=1)
    assert not harness.run((admit(4), Launch(), Retire(), Finish(0), admit(4)))


# -- what the helper refuses -----------------------------------------------------------------------


def refused(subject: Adapter, operation: Operation) -> str | None:
    outcome = subject.apply(operation)
    assert outcome.status == "refused"
    assert not subject.drain_events()
    return outcome.reason


def test_refusals() -> None:
    subject = build(requests=2, run_ahead=1)
    assert refused(subject, Launch()) == NOTHING_TO_RUN
    assert refused(subject, admit(25)) == LARGER_THAN_POOL
    told(subject, admit(20))
    assert refused(subject, admit(8, source=2)) == NO_FREE_BLOCKS
    assert refused(subject, Grow(0, 8)) == NO_FREE_BLOCKS
    assert subject.view().standing(0) == ("running", 20, 0, (5,))
    for end in (Finish(0), Abort(0), Preempt(0)):
        assert refused(subject, end) == NOT_LAUNCHED
    told(subject, Launch())
    assert refused(subject, Launch()) == RUN_AHEAD_LIMIT
    assert refused(subject, Reset()) == BLOCKS_IN_USE
    told(subject, admit(4, source=2))
    assert refused(subject, admit(4, source=3)) == TOO_MANY_REQUESTS
    for idle in (Fork(0), Resume(0)):
        assert subject.apply(idle) == SKIPPED


def test_a_launch_honours_its_budget_oldest_first() -> None:
    subject = build()
    told(subject, admit(6), admit(6, source=2))
    (step,) = told(subject, Launch(budget=8))
    assert isinstance(step, StepLaunched)
    assert [(item.request, item.start, item.end) for item in step.items] == [(0, 0, 6), (1, 0, 2)]


def test_an_engine_without_evict_and_reset_is_not_asked_for_them() -> None:
    class Plain(Template):
        evict = Adapter.evict
        reset = Adapter.reset

    assert build().capabilities - Plain(Configuration()).capabilities == {"evict", "reset"}


def test_without_prefix_caching_nothing_is_published() -> None:
    subject = build(prefix_caching=False)
    told(subject, admit(8), Launch(), Retire())
    assert subject.view().index(0) == {}


def test_a_counter_of_the_engine_is_believed() -> None:
    class Drifts(Template):
        def free_count(self) -> int:
            return len(self.free_blocks()) - 1

    harness = Harness(Drifts(Configuration()), audit_interval=1)
    (violation,) = harness.run((admit(4),))
    assert violation.property == "CONS"


def test_refused_is_for_want_of_blocks_unless_it_says_otherwise() -> None:
    assert (Refused().reason, Refused(BLOCKS_IN_USE).reason) == (NO_FREE_BLOCKS, BLOCKS_IN_USE)


def marked(**more: Any) -> list[int]:
    return Request(0, admit(6, **more)).marked_tokens


def test_marked_tokens_differ_where_no_prefix_may_be_shared() -> None:
    assert marked() == Request(0, admit(6)).tokens
    kinds: list[dict[str, Any]] = [
        {},
        {"salt": 1},
        {"adapter": 1},
        {"salt": 1, "adapter": 1},
        {"media": (Media(0, 0, 2),)},
        {"media": (Media(1, 0, 2),)},
        {"media": (Media(1, 0, 3),)},
        {"media": (Media(1, 1, 2),)},
        {"media": (Media(1, 0, 2),), "salt": 1},
    ]
    assert len({tuple(marked(**kind)) for kind in kinds}) == len(kinds)
    assert marked(media=(Media(1, 2, 2),))[:2] == marked()[:2]
    assert {*marked(salt=1)}.isdisjoint(marked())


class RunsOut(Exception):
    pass


class Raises(Template):
    """Says that there is no room by an exception of its own."""

    message = ""

    def admit(self, request: Request) -> int:
        try:
            return super().admit(request)
        except Refused:
            raise RunsOut(self.message) from None

    def publish(self, request: Request) -> None:
        raise RunsOut("nowhere")


class RaisesWords(Raises):
    message = "no block"


def test_what_an_admission_raises_is_told_with_what_it_should_raise() -> None:
    place = r"\(test_template\.py:\d+, in admit\); where there is no room, raise Refused"
    for adapter, told in ((Raises, "RunsOut"), (RaisesWords, "RunsOut: no block")):
        harness = Harness(adapter(Configuration(blocks=2, block_size=4)), audit_interval=1)
        (violation,) = harness.run((admit(8), admit(8)))
        assert re.fullmatch(f"admit raised {told} {place}", violation.message)
    harness = Harness(Raises(Configuration(blocks=2, block_size=4)), audit_interval=1)
    (violation,) = harness.run((admit(8), Launch(), Retire()))
    assert violation.message.endswith("in publish)")


def test_words_that_no_adapter_keeps_need_not_be_written() -> None:
    class Says(Template):
        semantics = Semantics(release_order="any")

    expected = Semantics(release_order="any", fences_releases=False, slots=False, swaps=False)
    assert Says.semantics == expected


BEYOND: dict[str, dict[str, Any]] = {
    "groups=2 is not with Adapter": {"groups": 2},
    "shared_pool=True is not with Adapter": {"shared_pool": True},
    "block_sizes=(8,) is not with Adapter": {"block_sizes": (8,)},
    "tiers=True is not with Adapter": {"tiers": True},
    "states=(0,) is not with Adapter": {
        "states": (0,),
        "windows": (2,),
        "stream_order": True,
        "exact_admission": False,
    },
    "exports=('free',) needs a view() of your own": {"exports": ("free",)},
    "exports_per_request=('x',) needs a view() of your own": {"exports_per_request": ("x",)},
}


@pytest.mark.parametrize("told", BEYOND)
def test_a_word_that_no_adapter_can_keep_to_is_bad_input(told: str) -> None:
    class Promises(Template):
        semantics = replace(Template.semantics, **BEYOND[told])

    for driven in (Harness, Witness):
        with pytest.raises(InputError, match=f"^{re.escape(told)}: see docs/adapters.md$"):
            driven(Promises(Configuration()))


def test_an_adapter_may_show_metrics_in_a_view_of_its_own() -> None:
    class Counts(AdapterView):
        def metrics(self) -> dict[str, int]:
            return {"free": self.free_count(0)}

    class Exports(Template):
        semantics = replace(Template.semantics, exports=("free",))

        def view(self) -> AdapterView:
            super().view()
            return Counts(self)

    assert Exports(Configuration(blocks=7)).view().metrics() == {"free": 7}


# -- the page --------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")


def test_examples_of_the_page_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert blocks
    for source in blocks:
        names: dict[str, Any] = {}
        exec(source, names)
        (test,) = [value for name, value in names.items() if name.startswith("test_")]
        test()


def test_the_page_explains_each_word_and_method() -> None:
    for word in Semantics.__struct_fields__:
        assert f"`{word}`" in PAGE, word
    hooks = [name for name, value in vars(Adapter).items() if _is_hook(name, value)]
    assert len(hooks) == 12
    for name in hooks:
        assert re.search(rf"`{name}\(", PAGE), name


def _is_hook(name: str, value: object) -> bool:
    return callable(value) and not name.startswith("_") and name not in _OF_A_SUBJECT


_OF_A_SUBJECT = ("apply", "drain_events", "view")


def test_defaults_of_the_page_are_the_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", PAGE, re.M)
    assert len(rows) > 15
    for word, default in rows:
        assert getattr(Semantics(), word) == literal_eval(default), word


def test_links_of_the_page_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(links) > 10
    for link in links:
        assert (ROOT / "docs" / link).is_file(), link


def test_figures_of_the_page() -> None:
    assert f"template.py), {len(Path(template.__file__).read_text().splitlines())} lines" in PAGE
    assert f"It draws {RUNS} runs" in PAGE
    able = abilities(Template)
    blocks = [draw_run(f"page/{number}", able).configuration.blocks for number in range(1000)]
    assert f"pools of {min(blocks)} to {max(blocks)} blocks" in PAGE

"""Swarm draws of a memory hierarchy: which tiers there are, and what moves between them.

As :mod:`kvproof.fuzz.swarm`, for the runs that have tiers: so few slots that copies evict each
other, all faults of a disk, results that come late, out of order, twice or not at all.  Little
happens to a block that was not computed, stored, saved and then lost above, in this order: so an
operation may bring along the one that is apt to follow it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Literal

from msgspec.structs import replace

from kvproof.invariants.operations import (
    Abort,
    Admit,
    AnyOperation,
    Cancel,
    Complete,
    Corrupt,
    DiskFile,
    Evict,
    Fail,
    Finish,
    Land,
    Launch,
    Notify,
    Offload,
    Preempt,
    Promote,
    Restart,
    Resume,
    Segment,
    Slow,
    Tier,
    Withhold,
)
from kvproof.invariants.subject import Configuration, OffloadMeaning

TIER_FEATURES = ("tiers", "disk", "arc", "late", "waits", "io-faults")
"""What a run may have on: tiers below the device; a disk; eviction by ARC; swaps that stay in
flight; admissions that wait for KV; faults of the disk, and blocks that somebody else takes."""
TIERS_SHARE = 0.4
"""Part of the runs that have tiers, where the subject can."""
_SHARES = {"disk": 0.8, "arc": 0.3, "late": 0.7, "waits": 0.6, "io-faults": 0.65}

_WEIGHTS = {
    "admit": 1.0,
    "launch": 0.5,
    "retire": 0.5,
    "offload": 0.3,
    "save": 0.2,
    "complete": 0.4,
    "finish": 0.8,
    "evict": 0.3,
    "lose": 0.1,
    "promote": 0.3,
    "fetch": 0.2,
}
"""What takes a block down and up again, bent a little in each run …"""
_FACTORS = (0.5, 1, 1, 2)
_BESIDE = {
    "grow": 1.0,
    "decode": 0.3,
    "reserve": 0.15,
    "abort": 0.3,
    "fork": 0.2,
    "reset": 0.1,
    "purge": 0.1,
    "starve": 0.05,
    "feed": 0.1,
    "flood": 0.05,
    "head": 0.05,
    "squeeze": 0.05,
    "wait": 0.1,
    "choke": 0.05,
    "preempt": 0.5,
    "resume": 0.3,
    "land": 0.3,
    "fail": 0.2,
    "cancel": 0.2,
    "notify": 0.2,
    "withhold": 0.1,
    "corrupt": 0.2,
    "rot": 0.05,
    "restart": 0.1,
    "slow": 0.1,
}
"""… and what happens meanwhile, of which many a run has nothing, or a lot."""
_BESIDE_FACTORS = (0, 0, 1, 1, 3)
_IO_FAULTS = ("withhold", "starve", "feed", "squeeze", "choke", "corrupt", "rot", "restart", "slow")
_ON_DISK = ("save", "fetch", "choke", "corrupt", "rot", "restart", "slow")
_KINDS = {
    "wait": "admit",
    "save": "offload",
    "fetch": "promote",
    "lose": "evict",
    "purge": "evict",
    "starve": "withhold",
    "feed": "withhold",
    "flood": "admit",
    "head": "admit",
    "squeeze": "withhold",
    "choke": "fail",
    "rot": "corrupt",
}
"""Uses of a kind: admissions that wait; copies to the disk and from there; evictions on the host,
and on any tier; all blocks of a tier withheld, or none; a prompt that needs nearly all of the
device, or only the first block of another one; all blocks of the device but one withheld; the
disk's failures; its index damaged."""
_DISTINCT = ("salt", "adapter", "media", "tails")
"""Features under which prompts differ …"""
_DISTINCT_SHARE = 0.3
"""… which this part of the runs keeps that would have them: what is stored has to be asked for
again."""
_COMPUTED = ("admit", "launch", "retire")
_STORED = (*_COMPUTED, "offload", "complete")
_LOST = (*_STORED, "finish", "evict")
_HEADED = (*_LOST, "head", "launch", "retire", "finish")
_FLOODED = (*_STORED, "finish", *["flood"] * 3, "launch", "retire", *["finish"] * 2)
_SAVED = (*_STORED, "save", "complete", "finish", "evict", "lose")
_TOURS: Mapping[OffloadMeaning, tuple[tuple[str, ...], ...]] = {
    "prefix": (
        (*_LOST, "promote", "complete", "admit"),
        (*_LOST, "promote", "admit", "land", "fail", "promote", "complete"),
        (*_LOST, "promote", "wait", "land", "fail", "promote", "complete", "wait"),
        (*_HEADED, "squeeze", "promote", "feed", "promote", "reset", "complete"),
        (*_FLOODED, "promote", "complete", "admit"),
        (*_LOST, "admit", "launch", "abort", "starve", "promote", "feed", "retire", "complete"),
        (*_COMPUTED, "offload", "fail", "offload", "notify", "complete", "notify"),
        (*_STORED, "save", "choke", "save", "choke", "save", "complete"),
        (*_STORED, "save", "restart", "save", "complete", "purge", "restart"),
        (*_STORED, "save", "cancel", "restart", "save", "complete", "rot", "restart"),
        (*_SAVED, "fetch", "complete", "promote", "complete", "admit"),
        (*_SAVED, "fetch", "admit", "complete", "lose", "fetch", "fail"),
        (*_SAVED, "fetch", "complete", "save", "complete", "purge"),
        (*_SAVED, "corrupt", "fetch", "complete", "fetch", "save", "choke"),
    ),
    "suspension": (
        (*_COMPUTED, "preempt", "complete", "resume", "complete", "launch", "retire"),
        (*_COMPUTED, "preempt", "complete", "resume", "abort", "complete"),
        (
            *_COMPUTED,
            "preempt",
            *["complete"] * 2,
            "resume",
            "fail",
            "launch",
            "complete",
            "launch",
        ),
        (*_COMPUTED, "preempt", "resume", "complete", "resume", "preempt", "complete"),
    ),
}
"""What has to be done, in this order, for a block to be promoted, to come back from the disk, to
be suspended and back, or for something to go wrong with it: which hardly ever happens by chance."""
_FLOOD = 30
"""Source of prompts that nobody else has."""
_NEWEST = 839
"""Modulo any number of candidates up to eight, the last of them."""


def _about(subject: Admit, operation: AnyOperation) -> AnyOperation:
    """The operation on what its tour is about: that prompt, the newest request and transfer."""
    if isinstance(operation, Admit):
        return replace(subject, wait=operation.wait)
    if isinstance(operation, Promote):
        prompt, salt, adapter, media = subject.prompt, subject.salt, subject.adapter, subject.media
        return Promote(prompt, salt, adapter, media, to=operation.to)
    if isinstance(operation, Preempt):
        return replace(operation, request=_NEWEST, swap=True)
    if isinstance(operation, Finish | Abort | Resume):
        return replace(operation, request=_NEWEST)
    if isinstance(operation, Notify):
        return Notify()
    if isinstance(operation, Land | Complete | Fail | Cancel | Restart):
        return replace(operation, transfer=_NEWEST)
    if isinstance(operation, Launch):
        return Launch()
    if isinstance(operation, Evict):
        return replace(operation, blocks=_NEWEST)
    return replace(operation, first=0) if isinstance(operation, Offload) else operation


Draws = dict[str, Callable[[], AnyOperation]]
"""By kind: draws an operation's arguments."""


def with_tier_features(
    rng: Random, features: tuple[str, ...], capabilities: frozenset[str]
) -> tuple[str, ...]:
    """The features of a run, if it has tiers; what cannot restart a disk has none."""
    kept = [name for name in features if name not in _DISTINCT or rng.random() < _DISTINCT_SHARE]
    drawn = [name for name, share in _SHARES.items() if rng.random() < share]
    return (*kept, "tiers", *(n for n in drawn if n != "disk" or "restart" in capabilities))


def draw_tiers(
    rng: Random, configuration: Configuration, features: tuple[str, ...]
) -> Configuration:
    """The configuration with tiers in it."""
    meanings: tuple[OffloadMeaning, ...] = ("both", "prefix", "suspension")
    (offload,) = rng.choices(meanings, (6, 3, 1))
    disk = "disk" in features and offload != "suspension"
    arc: list[Literal["lru", "arc"]] = [
        rng.choice(("lru", "arc")) if "arc" in features else "lru" for _ in range(3)
    ]
    return replace(
        configuration,
        offload=offload,
        host_blocks=rng.choice((1, 2, 4, 8, 16, 33)),
        disk_blocks=rng.choice((1, 2, 4, 16)) if disk else 0,
        device_eviction=arc[0],
        host_eviction=arc[1],
        disk_eviction=arc[2],
    )


def draw_weights(
    rng: Random, capabilities: frozenset[str], features: tuple[str, ...]
) -> dict[str, float]:
    """How often each kind of operation comes, or each use of one: each run draws it anew."""
    return {
        kind: weight * rng.choice(factors)
        for weights, factors in ((_WEIGHTS, _FACTORS), (_BESIDE, _BESIDE_FACTORS))
        for kind, weight in weights.items()
        if _KINDS.get(kind, kind) in capabilities
        and (kind not in _IO_FAULTS or "io-faults" in features)
        and (kind not in _ON_DISK or "disk" in features)
        and (kind != "wait" or "waits" in features)
    }


class TierArguments:
    """Draws the arguments of operations where there are tiers, with this run's fondnesses."""

    def __init__(
        self, rng: Random, configuration: Configuration, features: tuple[str, ...], plain: Draws
    ) -> None:
        """``plain``: what draws the operations of a run without tiers."""
        self._rng = rng
        self._features = frozenset(features)
        self._block_size = configuration.block_size
        self._plain = plain
        self._tours = [
            tour
            for meaning, tours in _TOURS.items()
            for tour in tours
            if meaning in configuration.meanings
        ]
        self._all = (configuration.blocks, configuration.host_blocks, configuration.disk_blocks)
        self._touring = rng.choice((0.3, 0.6, 0.9))
        """How often a tour comes before an operation …"""
        self._goes_on = rng.choice((0.9, 0.95, 0.99))
        """… and how often each of its operations leads to the next."""
        self._again = rng.choice((0.3, 0.6, 0.9))
        """How often a prompt is one of the latest ones."""
        self._latest: deque[Admit] = deque(maxlen=4)
        self._draws: Draws = {
            **plain,
            "admit": lambda: replace(self._prompt(), wait=self._is("waits", 0.5)),
            "wait": lambda: replace(self._prompt(), wait=True),
            "flood": self._flood,
            "head": lambda: self._head(self._prompt()),
            "squeeze": lambda: Withhold("device", max(1, self._all[0] - 1)),
            "evict": lambda: Evict(rng.choice((1, 2, self._all[0], self._all[0]))),
            "purge": self._purge,
            "preempt": self._preempt,
            "resume": lambda: replace(self._resume(), late=self._is("late", 0.7)),
            "offload": lambda: self._offload("host"),
            "save": lambda: self._offload("disk"),
            "lose": lambda: Evict(rng.choice((1, self._all[1])), "host"),
            "promote": lambda: self._promote("device"),
            "fetch": lambda: self._promote("host"),
            "starve": lambda: Withhold(
                "device" if rng.random() < 0.6 else self._tier()[0], _NEWEST
            ),
            "feed": lambda: Withhold(self._tier()[0]),
            "choke": lambda: Fail(
                self._transfer(), rng.choice(("short_write", "disk_full")), self._file()
            ),
            "land": lambda: Land(self._transfer(), rng.choice((1, 1, 2))),
            "complete": lambda: Complete(self._transfer()),
            "fail": self._fail,
            "cancel": lambda: Cancel(self._transfer()),
            "notify": lambda: Notify(self._transfer()),
            "withhold": self._withhold,
            "corrupt": lambda: Corrupt(int(rng.random() * 4), int(rng.random() * 128)),
            "rot": lambda: Corrupt(int(rng.random() * 4), int(rng.random() * 128), "index"),
            "restart": lambda: Restart(self._transfer(), int(rng.random() * 5)),
            "slow": lambda: Slow(rng.choice((1, 10))),
        }

    def run(self, weights: Mapping[str, float], count: int) -> list[AnyOperation]:
        """So many operations, with tours of what the run may do in between."""
        rng, operations = self._rng, list[AnyOperation]()
        tours = [tour for tour in self._tours if weights.keys() >= {*tour}]
        kinds = rng.choices(list(weights), list(weights.values()), k=count)
        while len(operations) < count:
            if tours and rng.random() < self._touring:
                operations += self._tour(rng.choice(tours), kinds)
            operations.append(self._draws[rng.choice(kinds)]())
        return operations[:count]

    def _tour(self, tour: Sequence[str], kinds: Sequence[str]) -> Iterator[AnyOperation]:
        """A tour, or its beginning; something else may come in between, or in place of a step."""
        rng, subject = self._rng, self._subject()
        for step in tour:
            if rng.random() < 0.07:
                other = self._draws[rng.choice(kinds)]()
                yield _about(subject, other) if rng.random() < 0.5 else other
                if rng.random() < 0.3:
                    continue
            yield self._step(subject, step)
            if rng.random() > self._goes_on:
                return

    def _step(self, subject: Admit, step: str) -> AnyOperation:
        if step == "head":
            return self._head(subject)
        operation = self._draws[step]()
        about = step != "flood" and self._rng.random() < 0.95
        return _about(subject, operation) if about else operation

    def _subject(self) -> Admit:
        """What a tour is about: mostly a prompt that other requests do not share."""
        admit, rng = self._prompt(), self._rng
        if rng.random() < 0.7:
            length = max(admit.prompt[0].length, 2 * self._block_size) + 1
            own = Segment(20 + int(rng.random() * 3), length)
            admit = replace(admit, prompt=(own, *admit.prompt[1:]))
            self._latest.append(admit)
        return admit

    def _is(self, feature: str, share: float) -> bool:
        return feature in self._features and self._rng.random() < share

    def _prompt(self) -> Admit:
        """An admission of something new, or of something that was asked for before."""
        rng, latest = self._rng, self._latest
        if latest and rng.random() < self._again:
            return latest[int(rng.random() * len(latest))]
        admit = self._plain["admit"]()
        assert isinstance(admit, Admit)
        latest.append(admit)
        return admit

    def _flood(self) -> Admit:
        """A prompt for all of the device but for a few blocks, or for half of it."""
        blocks, left = self._all[0], self._rng.choice((0, 1, 1, 2, 2, 3, None))
        rows = blocks // 2 if left is None else max(1, blocks - left)
        return Admit((Segment(_FLOOD + int(self._rng.random() * 3), rows * self._block_size),))

    def _head(self, admit: Admit) -> Admit:
        """The same prompt, of which only the first block can be hit."""
        first = admit.prompt[0]
        if first.length <= self._block_size:
            return admit
        return replace(admit, prompt=(Segment(first.source, self._block_size + 1),), slots=0)

    def _resume(self) -> Resume:
        resume = self._plain["resume"]()
        assert isinstance(resume, Resume)
        return resume

    def _preempt(self) -> Preempt:
        preempt = self._plain["preempt"]()
        assert isinstance(preempt, Preempt)
        return replace(preempt, late=preempt.swap and self._is("late", 0.7))

    def _transfer(self) -> int:
        return 0 if self._rng.random() < 0.6 else int(self._rng.random() * 4)

    def _offload(self, to: Literal["host", "disk"]) -> Offload:
        rng = self._rng
        return Offload(
            to,
            first=int(rng.random() * 4) if rng.random() < 0.3 else 0,
            blocks=rng.choice((0, 0, 1, 2)),
        )

    def _promote(self, to: Literal["device", "host"]) -> Promote:
        admit = self._prompt()
        return Promote(
            admit.prompt,
            salt=admit.salt,
            adapter=admit.adapter,
            media=admit.media,
            to=to,
            blocks=self._rng.choice((0, 0, 0, 1)),
        )

    def _file(self) -> DiskFile:
        """Where a write fails: mostly in the data."""
        return "index" if self._rng.random() < 0.3 else "data"

    def _fail(self) -> Fail:
        rng = self._rng
        return Fail(self._transfer(), rng.choice(("error", "timeout")))

    def _tier(self) -> tuple[Tier, int]:
        """One of those there are, and how many blocks it has."""
        tiers: tuple[Tier, ...] = ("device", "host", "disk")
        here = [*zip(tiers, self._all, strict=True)][: 3 if "disk" in self._features else 2]
        return self._rng.choice(here)

    def _purge(self) -> Evict:
        tier, blocks = self._tier()
        return Evict(self._rng.choice((1, 2, max(1, blocks))), tier)

    def _withhold(self) -> Withhold:
        tier, blocks = self._tier()
        return Withhold(tier, self._rng.choice((0, 0, 0, 1, 2, max(1, blocks - 1), blocks)))

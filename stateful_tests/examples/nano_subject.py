"""The small engine of :mod:`kvproof.stateful_tests.examples.nano` as a subject.

    kvproof check --subject kvproof.stateful_tests.examples.nano_subject:NanoSubject

What it does not promise: one queue holds all free blocks, cached or not, so evictions have no
order; a sequence that was preempted runs behind the others when it is back; and there is one step
at a time.  It has no salts, adapters or media: they are written into the tokens.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.adapter import Adapter, Part, Refused, Request
from kvproof.stateful_tests.examples.nano import BlockManager, Scheduler, Sequence


class NanoSubject(Adapter):
    name = "nano"
    semantics = Semantics(
        reserved=(),
        eviction_order="any",
        oldest_first=False,
        runs_ahead=False,
    )
    scheduler_class = Scheduler
    manager_class = BlockManager

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(replace(configuration, run_ahead=1))
        self.manager = self.manager_class(configuration.blocks, configuration.block_size)
        self.scheduler = self.scheduler_class(self.manager)
        self.sequences: dict[int, Sequence] = {}

    def admit(self, request: Request) -> int:
        known = self.sequences.get(request.number) if request.preemptions else None
        seq = known or Sequence(request.marked_tokens)
        if not self.scheduler.start(seq):
            raise Refused
        self.sequences[request.number] = seq
        return seq.num_cached_tokens

    def grow(self, request: Request, tokens: int) -> None:
        seq = self.sequences[request.number]
        if not self.scheduler.append(seq, request.marked_tokens[-tokens:]):
            raise Refused

    def release(self, request: Request) -> None:
        self.scheduler.stop(self.sequences[request.number])

    def schedule(self, budget: int) -> list[Part]:
        numbers = {id(seq): number for number, seq in self.sequences.items()}
        return [
            Part(self.requests[numbers[id(seq)]], start, end)
            for seq, start, end in self.scheduler.schedule(budget or 1 << 30)
        ]

    def publish(self, request: Request) -> None:
        self.scheduler.postprocess(self.sequences[request.number], request.computed)

    def table(self, request: Request) -> list[int]:
        return self.sequences[request.number].block_table

    def free_blocks(self) -> list[int]:
        return list(self.manager.free_block_ids)

    def ref_counts(self) -> list[int]:
        return [block.ref_count for block in self.manager.blocks]

    def index(self) -> dict[bytes, list[int]]:
        entries = self.manager.hash_to_block_id.items()
        return {key.to_bytes(8): [block_id] for key, block_id in entries}

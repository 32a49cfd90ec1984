"""The contract of a plan: checked as a whole, before any of it is applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvproof.engine.arithmetic import blocks_needed
from kvproof.engine.isolation import PolicyError
from kvproof.engine.job import Job, cached, known_tokens
from kvproof.engine.policy import Plan
from kvproof.engine.scheduler_state import State, suspended_state

if TYPE_CHECKING:
    from kvproof.engine.scheduler import Scheduler


class Validation:
    """Checks one plan as a whole.  The sums are those that Draft documents."""

    def __init__(self, scheduler: Scheduler, state: State) -> None:
        self._scheduler = scheduler
        self._engine = scheduler.engine
        self._limits = scheduler.limits
        self._state = state
        self._running = {request.id: request for request in state.running}

    def check(self, plan: Plan) -> None:
        """Raises PolicyError if the plan breaks the contract."""
        victims = self._victims(plan)
        admissions = self._run(plan, victims)
        self._reservations(plan, admissions)
        self._tokens(plan)
        self._sequences(victims, admissions)
        self._host(plan)
        self._blocks(plan, victims, admissions)

    def _job(self, number: int, what: str) -> Job:
        job = self._scheduler.jobs.get(number)
        if job is None:
            known = "it has ended" if 0 <= number < self._scheduler.arrivals else "there is none"
            raise PolicyError("unknown_request", f"the plan {what} request {number}: {known}")
        return job

    def _victims(self, plan: Plan) -> set[int]:
        victims: set[int] = set()
        for number in (*plan.preempt, *plan.swap):
            job = self._job(number, "preempts")
            if number in victims:
                raise PolicyError("twice", f"the plan preempts request {number} twice")
            if job.state != "running":
                raise PolicyError(
                    "impossible", f"the plan preempts request {number}, which is {job.state}"
                )
            victims.add(number)
        return victims

    def _run(self, plan: Plan, victims: set[int]) -> list[Job]:
        admissions, seen = [], set()
        for number, tokens in plan.run:
            job = self._job(number, "runs")
            if number in seen:
                raise PolicyError("twice", f"the plan runs request {number} twice")
            seen.add(number)
            if number in victims:
                raise PolicyError("twice", f"the plan both preempts and runs request {number}")
            self._share(job, tokens)
            if job.state != "running":
                admissions.append(job)
        return admissions

    def _share(self, job: Job, tokens: int) -> None:
        if job.state == "waiting" and self._scheduler.is_deferred(job.id):
            raise PolicyError(
                "impossible",
                f"the plan runs request {job.id}, which was not shown to it: KV is on its way to "
                "that request, or to one that arrived before",
            )
        pending = self._pending(job)
        if pending < 1:
            raise PolicyError(
                "impossible",
                f"the plan runs request {job.id}, whose next token a step in flight is sampling",
            )
        if not 1 <= tokens <= pending:
            raise PolicyError(
                "impossible",
                f"the plan runs {tokens} tokens of request {job.id}, which has {pending} to "
                "compute",
            )
        if tokens < pending and not self._limits.chunked_prefill:
            raise PolicyError(
                "chunk",
                f"the plan runs {tokens} of the {pending} tokens of request {job.id}, but chunked "
                "prefill is off",
            )

    def _pending(self, job: Job) -> int:
        if job.state == "running":
            return self._running[job.id].pending_tokens
        if job.state == "swapped":
            return suspended_state(job).pending_tokens
        length = known_tokens(job) if job.cache else job.prompt_tokens
        return length - self._state.hit(job).cached_tokens

    def _reservations(self, plan: Plan, admissions: list[Job]) -> None:
        admitted = {job.id for job in admissions}
        room = self._engine.configuration.blocks * self._engine.configuration.block_size
        for number, tokens in plan.reserve:
            if number not in admitted:
                raise PolicyError(
                    "reserve",
                    f"the plan reserves for request {number}, which it does not admit",
                )
            if not 0 <= tokens <= room:
                raise PolicyError(
                    "reserve",
                    f"the plan reserves {tokens} tokens for request {number}; the pool has {room}",
                )

    def _tokens(self, plan: Plan) -> None:
        total = sum([tokens for _, tokens in plan.run])
        if total > self._limits.token_budget:
            raise PolicyError(
                "budget",
                f"the plan computes {total} tokens in one iteration, but the token budget is "
                f"{self._limits.token_budget}",
            )

    def _sequences(self, victims: set[int], admissions: list[Job]) -> None:
        running = len(self._engine.running) - len(victims) + len(admissions)
        most = self._engine.configuration.requests
        if admissions and running > most:
            raise PolicyError(
                "sequences", f"the plan makes {running} requests run, but at most {most} may"
            )

    def _host(self, plan: Plan) -> None:
        needed = 0
        for number in plan.swap:
            request = cached(self._scheduler.jobs[number])
            if request.steps_in_flight:
                raise PolicyError(
                    "in_flight",
                    f"the plan swaps out request {number}, which a step in flight is computing",
                )
            needed += blocks_needed(request.computed, request.block_size)
        free = self._state.free_host_blocks
        if needed > free:
            raise PolicyError(
                "host_blocks",
                f"the plan swaps out {needed} blocks, but {free} host blocks are free",
            )

    def _blocks(self, plan: Plan, victims: set[int], admissions: list[Job]) -> None:
        engine, jobs = self._engine, self._scheduler.jobs
        free = self._state.free_blocks
        freed = sum([engine.blocks_freed(cached(jobs[number])) for number in victims])
        reserve, size = dict(plan.reserve), self._state.block_size
        needs: list[tuple[int, int]] = []
        for number, tokens in plan.run:
            job = jobs[number]
            if job.state == "running":
                state = self._running[number]
                blocks = blocks_needed(state.computed_tokens + tokens, size) - state.held_blocks
            else:
                blocks = self._admission(job, tokens, reserve, bool(victims))
            if blocks > 0:
                needs.append((number, blocks))
        needed = sum([blocks for _, blocks in needs])
        floor = self._limits.watermark_blocks if admissions else 0
        if needed > free + freed - floor:
            kind = "blocks" if needed > free + freed else "watermark"
            raise PolicyError(kind, self._too_many(needs, needed, freed, floor, bool(victims)))

    def _admission(self, job: Job, tokens: int, reserve: Mapping[int, int], preempts: bool) -> int:
        hit = self._state.hit(job)
        slots = max(hit.cached_tokens + tokens, reserve.get(job.id, 0))
        if preempts:
            # Its hits may be on the very blocks that the preempted ones are to give back.
            return blocks_needed(slots, self._state.block_size)
        return hit.blocks_for(slots, self._state.block_size)

    def _too_many(
        self, needs: list[tuple[int, int]], needed: int, freed: int, floor: int, preempts: bool
    ) -> str:
        state = self._state
        each = ", ".join([f"{blocks} for r{number}" for number, blocks in needs if blocks])
        free = f"{state.free_blocks} are free"
        if state.cached_free_blocks:
            free += f" ({state.cached_free_blocks} of them cached-free, which free_blocks includes)"
        if freed:
            free += f" and {freed} become free by preemption"
        if floor:
            free += f", of which {floor} must stay free (the watermark)"
        without = ", counted without prefix hits, because it preempts" if preempts else ""
        return f"the plan needs {needed} blocks ({each}{without}), but {free}"

"""SGLang's trees of cached prefixes as subjects, with their allocators and their table of slots.

What the adapter adds is what SGLang's scheduler does around them: it keeps requests and steps, and
calls SGLang's own functions when the scheduler does (``init_next_round_input``,
``alloc_for_extend``, ``alloc_for_decode``, ``checkpoint_kv_cache``, ``release_kv_cache``,
``release_req``).  Slots, rows, nodes, locks and hits are SGLang's own.

How it differs, and what is made of it:

* **Slots, not blocks.**  A row names a slot for each token.  A block is a page of slots, and a row
  whose slots are not those of whole pages is an error.  Page 0 is SGLang's dummy.
* **Rows are a pool, too.**  That each is free or one running request's is seen to here: a view
  shows no rows, so a lost one is an error.
* **What it counts as locked** no view shows either: it is compared with the locks when nothing
  runs, as SGLang's own checks do.
* **No reference counts.**  A page belongs to the tree, to one row, or to nobody.  Of a page in the
  tree the count is its node's ``lock_ref``, since a request locks the path that its row begins
  with; of a page that rows own, the number of those rows.
* **Prompts are published when they are computed, the rest at the end.**  A step that computes part
  of a prompt (or of what a request was resumed with) ends with a checkpoint; steps that decode
  do not.
* **A checkpoint rewrites the row.**  Pages that the tree has already are freed, and the row names
  the tree's: the events are ``BlockMerged``.
* **Whole leaves are evicted**, each told by an event, so an eviction may take more than was asked
  for.  The room for a request is estimated, by up to two pages too many, and a retraction makes
  room for 20 more tokens of each request that goes on.  The order is that of the
  tree's own times, which the view shows: a hit that ends within a node is a use of all of it.
  A node that is split has a head that is younger than the node before it; leaves go first.
* **Nothing is fenced.**  Steps run in the order of one stream, and a request may end, be retracted
  or be merged while a step in flight still names its slots.
* **A prompt has slots as a whole from its admission on**; the budget of a step only cuts what is
  computed.
* A salt is a ``cache_salt``, an adapter a ``lora_id``.  A media item is values of its own in the
  tokens, as SGLang writes them there before the tree sees them.  Fork is not a capability: parallel
  samples are separate requests.
* ``computed`` in the view is the adapter's, since SGLang's scheduler keeps it, so comparing it says
  something of SGLang only at admissions.
* The tree has no keys of pages; those that are told are the adapter's (``sglang_keys``).
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import groupby
from typing import Any, Literal

from kvproof.invariants.events import (
    BlockMerged,
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    RequestGrown,
    RequestPreempted,
    RequestsDecoded,
    StepItem,
    StepRetired,
)
from kvproof.invariants.operations import (
    KINDS,
    Admit,
    Decode,
    Evict,
    Grow,
    Launch,
    Operation,
    Preempt,
    Reset,
    Retire,
)
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    NO_FREE_BLOCKS,
    SKIPPED,
    Outcome,
)
from kvproof.invariants.prompts import clip_media, prompt_tokens, sampled_tokens
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.subjects.sglang_keys import keys_of_pages
from kvproof.stateful_tests.subjects.sglang_package import load_sglang
from kvproof.stateful_tests.subjects.sglang_requests import Batch, SglangLive
from kvproof.stateful_tests.subjects.sglang_view import SglangView
from kvproof.stateful_tests.subjects.told_cache import ToldCache, by_number, pick

_MEDIA_SHIFT = 22
"""Of an item's number in the values of its tokens: an item is shorter than 1 << 22 tokens."""


class SglangSubject(ToldCache[SglangLive]):
    """Drives one of SGLang's trees as its scheduler would, one operation at a time.

    Raises SubjectUnavailable where SGLang 0.5.23 is not installed.
    """

    name: str
    capabilities = frozenset(KINDS) - {"fork", "reserve"}
    semantics = Semantics(
        groups=1,
        reserved=(0,),
        publishes="at_release",
        duplicates="merged",
        fences_releases=False,
        stream_order=True,
        release_order="any",
        eviction_order="shown",
        exact_admission=True,
        exact_eviction=False,
        eviction_margin=2,
        preemption_room=20,
        slots=False,
        swaps=False,
    )

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self._sglang = load_sglang()
        self.tree = self._new_tree()
        self.allocator = self.tree.token_to_kv_pool_allocator
        self.rows = self.tree.req_to_token_pool
        self._groups = range(self.semantics.groups)
        self._keys: list[dict[int, bytes]] = [{} for _ in self._groups]
        """By group: pages in the tree, and the key under which each was told as published …"""
        self._node_of: list[dict[int, Any]] = [{} for _ in self._groups]
        """… and where in the tree each was before the operation."""
        self._view = SglangView(self)
        self._handlers[Decode] = self._decode

    def apply(self, operation: Operation) -> Outcome:
        outcome = super().apply(operation)
        self._look()
        if not self.running:
            self._quietly(self._check_at_rest)
        return outcome

    def _look(self) -> None:
        """Raises ValueError where rows or nodes are not such as a view can show."""
        used = Counter(live.request.kv.req_pool_idx for live in self.running)
        used.update(self.rows.free_slots)
        every = Counter(range(1, self.configuration.requests + 1))
        if used != every:
            wrong = sorted((used - every) | (every - used))
            raise ValueError(f"rows {wrong} are neither free nor one running request's alone")
        for live in self.running:
            self.tables(live)
        self._node_of = [
            {page: node for node, pages in self.nodes(group) for page in pages}
            for group in self._groups
        ]

    def view(self) -> SglangView:
        return self._view

    # -- what SGLang has ---------------------------------------------------------------------------

    @abstractmethod
    def _new_tree(self) -> Any:
        """Over an allocator with one page per block, and a row for each running request."""

    @abstractmethod
    def part(self, node: Any, group: int) -> Any:
        """What of a node has its slots and its locks."""

    @abstractmethod
    def _check_at_rest(self) -> None:
        """Raises where SGLang's own books of its tree are wrong while nothing runs."""

    def free_pages(self, group: int) -> int:
        """As its scheduler counts them: free, or in the tree and not locked."""
        tokens: int = self.allocator.available_size() + self.tree.evictable_size()
        return tokens // self.configuration.block_size

    def unused_pages(self, group: int) -> list[int]:
        """Neither a request's nor in the tree."""
        pages: list[int] = self.allocator.get_all_free_pages().tolist()
        return pages

    def _room(self) -> int:
        """Pages that a request can have more, in each group."""
        return min([self.free_pages(group) for group in self._groups])

    def tables(self, live: SglangLive) -> tuple[list[int], ...]:
        return (self.table(live),)

    def table(self, live: SglangLive) -> list[int]:
        """The pages that a request's row names."""
        kv = live.request.kv
        return self._row(kv.req_pool_idx, kv.kv_allocated_len) if kv.holds_kv else []

    def _row(self, row: int, tokens: int) -> list[int]:
        return self._pages(self.rows.req_to_token[row, :tokens].tolist())

    def _pages(self, slots: list[int]) -> list[int]:
        size = self.configuration.block_size
        pages = [slot // size for slot in slots[::size]]
        whole = [page * size + offset for page in pages for offset in range(size)]
        if slots != whole[: len(slots)]:
            raise ValueError(f"slots {slots} are not those of whole pages of {size}")
        return pages

    def nodes(self, group: int) -> list[tuple[Any, list[int]]]:
        """The nodes of the tree, parents first, each with its pages, if it has some."""
        found, stack = [], list(self.tree.root_node.children.values())
        while stack:
            node = stack.pop()
            slots = self.part(node, group).value
            if slots is not None and len(slots) != len(node.key):
                raise ValueError(f"a node has {len(slots)} slots for {len(node.key)} tokens")
            found.append((node, [] if slots is None else self._pages(slots.tolist())))
            stack += node.children.values()
            if len(found) > self.configuration.blocks:
                raise ValueError("the tree has more nodes than there are pages")
        return found

    def keys_in_tree(self, group: int) -> dict[int, bytes]:
        """Page by page what is findable, heads before their extensions."""
        size = self.configuration.block_size
        return keys_of_pages(self.tree.root_node, self.nodes(group), size)

    # -- admission ---------------------------------------------------------------------------------

    def _new_live(self, number: int, operation: Admit) -> SglangLive:
        return SglangLive(number, self._new_request(operation))

    def _new_request(self, operation: Admit) -> Any:
        tokens = array("q", prompt_tokens(operation.prompt, operation.media))
        for item in clip_media(operation.media, len(tokens)):
            for offset in range(item.length):
                tokens[item.start + offset] = -1 - (item.item << _MEDIA_SHIFT | offset)
        return self._sglang.request(
            rid=f"request-{self._next_request}",
            origin_input_text="",
            origin_input_ids=tokens,
            sampling_params=self._sglang.sampling,
            lora_id=f"adapter-{operation.adapter}" if operation.adapter else None,
            cache_salt=f"salt-{operation.salt}" if operation.salt else None,
        )

    def _place(self, live: SglangLive) -> bool:
        """Match and lock the prefix, and take slots for the rest; False if they are not there."""
        request = live.request
        request.init_next_round_input(self.tree)
        hits = request.prefix_len // self.configuration.block_size
        # The hits are protected from here on, and do not count as free.
        lock = self.tree.lock(request.last_node)
        if self._needs(live.length) - hits > self._room():
            self.tree.unlock(lock)
            return False
        request.lock = lock
        live.computed = live.scheduled = request.prefix_len
        self._extend(live, live.length)
        live.asked = live.length
        live.running = True
        if hits:
            self._tell_reused(live, hits)
        self._tell_evicted("pressure")
        self._tell_allocated(live, hits)
        return True

    # -- slots -------------------------------------------------------------------------------------

    def _extend(self, live: SglangLive, end: int) -> None:
        """Slots from where the request's prefix ends, as for part of a prompt."""
        request, tensor = live.request, self._sglang.tensor
        request.extend_end = end
        batch = self._batch(
            [live],
            prefix_lens=[request.prefix_len],
            extend_lens=[end - request.prefix_len],
            extend_num_tokens=end - request.prefix_len,
            seq_lens=tensor([end]),
            seq_lens_cpu=tensor([end]),
        )
        self._quietly(self._sglang.allocation.alloc_for_extend, batch)

    def _step_on(self, lives: Sequence[SglangLive]) -> None:
        """A slot for one more token of each, as for a batch that decodes."""
        tensor = self._sglang.tensor
        rows = tensor([live.request.kv.req_pool_idx for live in lives])
        lengths = tensor([live.request.kv.kv_allocated_len for live in lives])
        batch = self._batch(
            lives,
            req_pool_indices=rows,
            req_pool_indices_cpu=rows,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
        )
        self._quietly(self._sglang.allocation.alloc_for_decode, batch, 1)

    def _batch(self, lives: Sequence[SglangLive], **fields: Any) -> Batch:
        return Batch(
            reqs=[live.request for live in lives],
            tree_cache=self.tree,
            req_to_token_pool=self.rows,
            **fields,
        )

    def _quietly(self, call: Callable[..., object], *arguments: object) -> None:
        with redirect_stdout(StringIO()):  # SGLang prints its tree before it raises
            call(*arguments)

    def _grow(self, operation: Grow) -> Outcome:
        live = pick(self.running, operation.request)
        if live is None:
            return SKIPPED
        before, tokens = live.length, operation.tokens
        rows = self._needs(before)
        if self._needs(before + tokens) - rows > self._room():
            return Outcome("refused", NO_FREE_BLOCKS, live.number)
        live.request.output_ids.extend(sampled_tokens(operation.choice, before, tokens))
        if tokens == 1:
            self._step_on([live])
        else:
            live.request.prefix_len = before
            self._extend(live, before + tokens)
        self._tell_evicted("pressure")
        self._tell_allocated(live, rows)
        self._events.append(RequestGrown(live.number, tokens))
        return Outcome("done", None, live.number)

    def _decode(self, operation: Decode) -> Outcome:
        count = len(self.running)
        if not count:
            return SKIPPED
        lives = [self.running[i] for i in dict.fromkeys(r % count for r in operation.requests)]
        rows = [self._needs(live.length) for live in lives]
        needed = sum([self._needs(live.length + 1) for live in lives]) - sum(rows)
        if needed > self._room():
            return Outcome("refused", NO_FREE_BLOCKS)
        for live in lives:
            live.request.output_ids.extend(sampled_tokens(operation.choice, live.length, 1))
        self._step_on(lives)
        self._tell_evicted("pressure")
        for live, first in zip(lives, rows, strict=True):
            self._tell_allocated(live, first)
        numbers = [live.number for live in lives]
        self._events.append(RequestsDecoded(numbers))
        return Outcome("done", children=tuple(numbers))

    # -- the ways out ------------------------------------------------------------------------------

    def _release(self, live: SglangLive) -> None:
        """The tree keeps what is computed, unless the prompt itself is not."""
        request, row, before = live.request, live.request.kv.req_pool_idx, self.tables(live)
        past_prompt = live.computed >= live.prompt_length
        if past_prompt and live.computed < live.length:
            request.finished_len = live.computed - live.prompt_length
        request.finished_reason = self._sglang.finished(live.computed)
        length = live.length
        self._sglang.common.release_kv_cache(request, self.tree, checkpoint=past_prompt)
        after = self._last_tables(before, self._row(row, length))
        self._tell_checkpoint(live, before, after)
        self._tell_released(live, after)

    def _preempt(self, operation: Preempt) -> Outcome:
        live = pick(self.running, operation.request)
        if live is None:
            return SKIPPED
        tables = self.tables(live)
        self.running.remove(live)
        self._sglang.release_req(
            req=live.request,
            remaing_req_count=len(self.running),
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            hisparse_coordinator=None,
        )
        insort(self.preempted, live, key=by_number)
        live.running = False
        live.computed = live.scheduled = 0
        live.epoch += 1
        self._tell_released(live, tables)
        self._tell_evicted("pressure")
        self._events.append(RequestPreempted(live.number))
        return Outcome("done", None, live.number)

    # -- the tree ----------------------------------------------------------------------------------

    def _evict(self, operation: Evict) -> Outcome:
        tokens = operation.blocks * self.configuration.block_size
        self._evict_tokens(tokens)
        return Outcome("done", count=self._tell_evicted("request"))

    def _evict_tokens(self, tokens: int) -> None:
        self.tree.evict(self._sglang.evict_params(num_tokens=tokens))

    def _reset(self, operation: Reset) -> Outcome:
        """SGLang's flush, which is for a server that runs nothing."""
        if self.running:
            return Outcome("refused", BLOCKS_IN_USE)
        self.tree.reset()
        self.rows.clear()
        self.allocator.clear()
        return Outcome("done", count=self._tell_evicted("reset"))

    # -- steps -------------------------------------------------------------------------------------

    def _items(self, operation: Launch) -> list[StepItem]:
        left = operation.budget or 1 << 62
        items = []
        for live in self.running:
            start, end = live.scheduled, min(live.length, live.scheduled + left)
            if start < end:
                items.append(StepItem(live.number, live.epoch, start, end, self.tables(live)))
                live.scheduled = end
                left -= end - start
        return items

    def _retire(self, operation: Retire) -> Outcome:
        if not self.steps:
            return SKIPPED
        step = self.steps.popleft()
        self._events.append(StepRetired(step.step))
        for item in step.items:
            live = self.live.get(item.request)
            if live is not None and live.epoch == item.epoch:
                live.computed = item.end
                if item.start < live.asked:
                    self._checkpoint(live)
        return Outcome("done", count=len(step.items))

    def _checkpoint(self, live: SglangLive) -> None:
        """Part of a prompt is computed: the tree takes its full pages."""
        request, before = live.request, self.tables(live)
        request.refresh_fill_ids()
        request.extend_end = live.computed
        self._sglang.common.checkpoint_kv_cache(request, self.tree)
        self._tell_checkpoint(live, before, self.tables(live))

    # -- events, derived from SGLang's state -------------------------------------------------------

    def _last_tables(self, before: Sequence[list[int]], row: list[int]) -> tuple[list[int], ...]:
        """What a request had as it was released, of which its row is still there."""
        return (row,)

    def _tell_reused(self, live: SglangLive, hits: int) -> None:
        for group, table in enumerate(self.tables(live)):
            behind = table[:hits].count(0)
            self._events.append(BlocksReused(group, live.number, behind, table[behind:hits]))

    def _tell_allocated(self, live: SglangLive, first: int) -> None:
        for group, table in enumerate(self.tables(live)):
            if table[first:]:
                self._events.append(BlocksAllocated(group, live.number, first, table[first:]))

    def _tell_released(self, live: SglangLive, tables: Sequence[list[int]]) -> None:
        for group, table in enumerate(tables):
            self._events.append(BlocksReleased(group, live.number, list(filter(None, table))))

    def _tell_evicted(self, cause: Literal["pressure", "request", "reset"]) -> int:
        """Tell node by node which pages are in the tree no longer, extensions before heads."""
        count = 0
        for group in self._groups:
            now, keys = self.keys_in_tree(group), self._keys[group]
            lost = [page for page, key in keys.items() if now.get(page) != key][::-1]
            for _, node in groupby(lost, self._node_of[group].get):
                pages = list(node)
                gone = [keys[page] for page in pages]
                self._events.append(BlocksEvicted(group, pages, gone, cause))
            self._keys[group] = {page: now[page] for page in now if page in keys}
            count += len(lost)
        return count

    def _tell_checkpoint(
        self, live: SglangLive, before: Sequence[list[int]], after: Sequence[list[int]]
    ) -> None:
        """Tell which rows of a table the tree took, and which it replaced by its own pages."""
        for group in self._groups:
            self._tell_taken(group, live, before[group])
            for row, (source, target) in enumerate(zip(before[group], after[group], strict=True)):
                if source != target:
                    self._events.append(BlockMerged(group, live.number, row, source, target))

    def _tell_taken(self, group: int, live: SglangLive, table: list[int]) -> None:
        now, keys = self.keys_in_tree(group), self._keys[group]
        rows = [row for row, page in enumerate(table) if page in now and page not in keys]
        for _, run in groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
            new = [row for _, row in run]
            pages = [table[row] for row in new]
            found = [now[page] for page in pages]
            self._events.append(BlocksPublished(group, live.number, new[0], pages, found))
        self._keys[group] = now

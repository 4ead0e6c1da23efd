"""Deliberate bugs, each one change of one place in the source. Every one of them must be found by a finder."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` occurs exactly once in the module; with `new` in its place kvtier is wrong in the way that `note` says."""

    name: str
    module: str
    """Path of the file inside the package."""
    old: str
    new: str
    note: str


_BLOCKS = "index/blocks.py"
_CPU = "manager/cpu.py"
_QUERIES = "manager/queries.py"
_HINTED = "manager/hinted.py"
_BREAKER = "manager/breaker.py"
_COMPLETIONS = "manager/completions.py"
_DRIVER = "manager/driver.py"
_FILTER = "manager/reuse_filter.py"
_JOBS = "manager/jobs.py"
_REQUESTS = "manager/requests.py"
_ROOM = "manager/room.py"
_TIERED = "manager/tiered.py"
_TRANSFERS = "manager/tier_transfers.py"
_PERSISTED = "manager/persisted.py"
_KEEPER = "tiers/ram_keeper.py"

MUTANTS = [
    # pins
    Mutant("no-pin", _CPU, "        index.pin(own)\n", "", "a load pins nothing"),
    Mutant("unpin-dropped", _COMPLETIONS, "    index.unpin(ending)\n", "", "a load that ends leaves its pins"),
    Mutant(
        "condemned-unpin-dropped",
        _BLOCKS,
        "        entry.readers -= 1\n",
        "",
        "a load that ends after a reset leaves its pins",
    ),
    Mutant(
        "unpin-half-way",
        _BLOCKS,
        "still_held = 0 if missing is not None else 1",
        "still_held = 1",
        "a refused completion has unpinned the keys before the bad one",
    ),
    # evicting
    Mutant("evict-pinned", _ROOM, "protected.append(index.pins)", "pass", "evicts a block that a load reads"),
    Mutant("evict-in-flight", _ROOM, "protected.append(index.in_flight)", "pass", "evicts a block that a store writes"),
    Mutant("evict-own-keys", _ROOM, "[own] if len(new) < len(own) else []", "[]", "evicts a key of the very call"),
    Mutant(
        "evict-own-prefix",
        _ROOM,
        "    protected = [*protected, request.accessed]\n",
        "",
        "a long prompt evicts its own beginning",
    ),
    Mutant(
        "store-behind-a-hole", _ROOM, "    request.shed = len(victims) < count\n", "", "stores what lies behind a cut"
    ),
    Mutant(
        "room-off-by-one",
        _CPU,
        "fitting -= missing - len(evicted)",
        "fitting -= missing - len(evicted) + 1",
        "one block less is stored than fits",
    ),
    Mutant(
        "eviction-not-told",
        _CPU,
        "                self._emit(evicted, removed=True)\n",
        "                pass\n",
        "an eviction has no event",
    ),
    Mutant(
        "prefix-evicted-first",
        _CPU,
        "self._order.settle(reversed(request.accessed), request.inserted)",
        "self._order.settle(request.accessed, request.inserted)",
        "the beginning of a prompt leaves before its end",
    ),
    # waiting
    Mutant(
        "deadline-forgotten",
        _REQUESTS,
        "self.expired = now_s >= self.deadline_at_s",
        "self.expired = False",
        "no wait ever ends",
    ),
    Mutant(
        "deadline-restarts",
        _REQUESTS,
        "if self.deadline_at_s == math.inf:",
        "if True:",
        "asking again puts the deadline off",
    ),
    Mutant(
        "still-waiting-for-ever",
        _QUERIES,
        "return request.stuck_key if self._may_wait_for_stores(request) else None",
        "return request.stuck_key",
        "the short answer to a deferred request knows no deadline",
    ),
    Mutant(
        "behind-a-load-for-ever",
        _DRIVER,
        "in self._being_loaded:\n            return None if manager.defer(context) else 0",
        "in self._being_loaded:\n            return None",
        "a wait behind another request's load knows no deadline",
    ),
    Mutant(
        "time-runs-back",
        _CPU,
        "if now_s <= self._now_s:",
        "if now_s == self._now_s:",
        "a clock that lags puts deadlines off",
    ),
    Mutant(
        "load-may-begin-any-time",
        _REQUESTS,
        "return max(min(self.deadline_at_s, now_s + deadline_s), now_s + MIN_LOAD_BEGIN_S)",
        "return None",
        "a load has no time by which it must begin",
    ),
    # looking up
    Mutant(
        "arriving-is-ready",
        _QUERIES,
        "takewhile(self._ready.__contains__, keys)",
        "takewhile(self.policy.__contains__, keys)",
        "a block that is being written counts as ready",
    ),
    Mutant(
        "stored-twice",
        _CPU,
        "new = list(filterfalse(self._in_flight.__contains__, new))",
        "pass",
        "a block in flight is stored again",
    ),
    Mutant(
        "loaded-twice",
        _DRIVER,
        "request.behind = next(filter(self._being_loaded.__contains__, hits), None)",
        "request.behind = None",
        "a block that is being loaded is loaded once more",
    ),
    Mutant(
        "load-never-over",
        _DRIVER,
        "if not self._being_loaded[key]:",
        "if False:",
        "requests wait behind loads that have ended",
    ),
    Mutant(
        "filter-off-by-one",
        _FILTER,
        "if counts.get(key, 0) >= threshold]",
        "if counts.get(key, 0) > threshold]",
        "a block is stored one use too late",
    ),
    Mutant(
        "offer-counts-twice",
        _FILTER,
        "            if key not in counted:\n",
        "            if True:\n",
        "a request that offers a block again counts as another one",
    ),
    # fencing
    Mutant(
        "store-fence-skipped",
        _COMPLETIONS,
        "if index.in_flight.get(key) == slot and index.generations[slot] == generation:",
        "if index.in_flight.get(key) is not None:",
        "a late completion publishes the next write of its key",
    ),
    Mutant(
        "condemned-fence-skipped",
        _COMPLETIONS,
        "if entry is not None and entry.has_writer and index.generations[slot] == generation:",
        "if entry is not None and entry.has_writer:",
        "a late completion frees the slot of a writer that still writes",
    ),
    Mutant(
        "one-generation",
        _BLOCKS,
        "self.num_allocations = generation = self.num_allocations + 1",
        "self.num_allocations = generation = 1",
        "all allocations have the same number",
    ),
    Mutant(
        "reap-frees-at-once",
        _CPU,
        "self._index.condemn_writes(overdue)",
        "self._index.abandon(overdue)",
        "the slot of a reaped store is handed out while its writer writes",
    ),
    Mutant(
        "reap-never",
        "manager/ages.py",
        "while self._begun and now_s - self._begun[0][0] >= self.timeout_s:",
        "while False:",
        "a store that hangs stays in flight",
    ),
    Mutant(
        "reaped-stay-in-policy",
        _CPU,
        "            self._order.remove(overdue)\n",
        "",
        "the policy can evict what was reaped",
    ),
    Mutant(
        "condemned-for-ever",
        _BLOCKS,
        "        entry.has_writer = False\n",
        "",
        "a condemned slot is not free when its writer is done",
    ),
    Mutant(
        "freed-under-readers",
        _BLOCKS,
        "if entry.readers or entry.has_writer:",
        "if entry.has_writer:",
        "a condemned slot is free when the first of its readers leaves",
    ),
    # failures
    Mutant(
        "failed-store-is-ready",
        _CPU,
        "        if success:\n            arrived",
        "        if True:\n            arrived",
        "a failed store becomes a block",
    ),
    Mutant(
        "slot-leaked",
        _BLOCKS,
        "self._freed += map(self._abandon_from.pop, keys)",
        "list(map(self._abandon_from.pop, keys))",
        "the slot of a failed store is lost",
    ),
    Mutant(
        "failed-stay-in-policy",
        _CPU,
        "            self._order.remove(failed)\n",
        "",
        "the policy can evict what failed",
    ),
    Mutant(
        "failed-load-stays",
        _CPU,
        "self._withdraw(list(filter(self._ready.__contains__, keys)))",
        "pass",
        "what could not be loaded is found again",
    ),
    Mutant(
        "failed-load-frees-at-once",
        _CPU,
        "        self._index.condemn_reads(pinned)\n",
        "",
        "a block found bad is freed under its other readers",
    ),
    # reset
    Mutant(
        "reset-frees-written",
        _CPU,
        "self._index.condemn_writes(list(self._in_flight))",
        "self._index.abandon(list(self._in_flight))",
        "a reset frees slots that are being written",
    ),
    Mutant(
        "reset-frees-read",
        _CPU,
        "        self._index.condemn_reads(list(self._index.pins))\n",
        "",
        "a reset frees slots that are being read",
    ),
    Mutant(
        "reset-keeps-blocks",
        _CPU,
        "        self._index.drop([*self._ready, *self._index.restored])\n"
        "        self._index.renew_free_order()\n"
        "        self._order.",
        "        self._counters.copy().",
        "what was reset is still found",
    ),
    # jobs
    Mutant("job-never-ends", _JOBS, "        del self._jobs[job_id]\n", "", "a job completes a second time"),
    Mutant(
        "first-rank-ends-job",
        _JOBS,
        "if record.num_pending > 0:",
        "if False:",
        "the first rank's report ends the job of all",
    ),
    Mutant(
        "rank-counts-twice",
        _JOBS,
        "            record.reported |= 1 << rank\n",
        "            pass\n",
        "a report that comes twice counts for another rank",
    ),
    Mutant(
        "failure-forgotten",
        _JOBS,
        "record.failed = record.failed or failed",
        "record.failed = failed",
        "the last rank's success hides another's failure",
    ),
    Mutant(
        "wrong-blocks-stored",
        _DRIVER,
        "position = {key: first + i for i, key in enumerate(keys)}",
        "position = {key: i for i, key in enumerate(keys)}",
        "other blocks of the request are copied than were granted",
    ),
    Mutant(
        "preempted-not-stored",
        _DRIVER,
        "        self._request(req_id).num_offered = 0\n",
        "        self._request(req_id)\n",
        "what a preempted request computes again is not offered",
    ),
    # circuit breaker
    Mutant(
        "lost-probe-shuts-for-ever",
        _BREAKER,
        "        else:  # the probe is lost\n            self._open()\n",
        "",
        "a probe that never ends leaves the tier shut",
    ),
    Mutant(
        "open-for-ever",
        _BREAKER,
        "if not self.is_shut or now_s < self.until_s:",
        "if True:",
        "a tier that was shut off is never tried again",
    ),
    Mutant(
        "loads-while-shut",
        _QUERIES,
        "            return PrefixLookup(0, _ABSENT)\n        num_ready",
        "            pass\n        num_ready",
        "blocks of a tier that is shut off are found",
    ),
    # policies
    Mutant(
        "arc-keeps-removed",
        "policy/arc.py",
        "        discard(self.t2, keys)\n",
        "",
        "a key that was used twice cannot be removed",
    ),
    Mutant(
        "arc-ghost-to-t1",
        "policy/arc.py",
        "                    t2[key] = None\n                else:\n                    t1",
        "                    t1[key] = None\n                else:\n                    t1",
        "a ghost hit enters T1",
    ),
    Mutant(
        "lru-unprotected",
        "policy/lru.py",
        "victims = least_recent(self._queue, count, protected)",
        "victims = least_recent(self._queue, count)",
        "the policy gives away what it was told to keep",
    ),
    # tiers below RAM
    Mutant(
        "failed-promotion-is-ready",
        _TRANSFERS,
        "self._ram.complete_store(failed, job.context, success=False, spec=job.spec)",
        "self._ram.complete_store(failed, job.context, spec=job.spec)",
        "what a tier could not bring up is found in RAM",
    ),
    Mutant(
        "cascade-pins-for-ever",
        _TRANSFERS,
        "        self._ram.complete_load(job.keys, job.context, spec=job.spec)\n",
        "",
        "a block that went down stays pinned in RAM",
    ),
    Mutant(
        "refused-cascade-pins",
        _TRANSFERS,
        "            self._ram.complete_load(keys[num_accepted:], context, spec=spec)\n",
        "            pass\n",
        "a block that a tier refused stays pinned in RAM",
    ),
    Mutant(
        "second-report-counts",
        _TRANSFERS,
        "        del self._jobs[outcome.job_id]\n",
        "",
        "a tier's second report of a job is believed",
    ),
    Mutant(
        "promotions-uncounted",
        _TRANSFERS,
        "            self.num_promoting -= len(job.keys)\n",
        "",
        "room that promotions took never comes back",
    ),
    Mutant(
        "reset-spares-tiers",
        _TIERED,
        "return tier.reset(epoch)",
        "return []",
        "blocks of other weights are brought up",
    ),
    # hints
    Mutant(
        "hints-pins-unprotected",
        _QUERIES,
        "            protected.append(self._hinted.kept)\n",
        "            pass\n",
        "what a hint has pinned is evicted",
    ),
    Mutant(
        "hints-pins-stay",
        _HINTED,
        "        for key in keys:\n            self.kept.pop(key, None)\n",
        "        for key in keys:\n",
        "a block that has left is still counted as pinned",
    ),
    Mutant(
        "hints-pins-beyond",
        _HINTED,
        "if len(self.kept) < self.max_kept:",
        "if len(self.kept) <= self.max_kept:",
        "hints pin one block more than they may",
    ),
    Mutant(
        "hints-first-unprotected",
        _HINTED,
        "                if not any(key in container for container in protected):\n",
        "                if True:\n",
        "what goes first goes while it is read",
    ),
    Mutant(
        "hints-no-store",
        _CPU,
        "request.hints.no_store:",
        "request.hints.ended:",
        "a request that wanted nothing stored is stored",
    ),
    # a RAM pool that outlives its process
    Mutant(
        "persisted-unchecked",
        _PERSISTED,
        "self._index.recall(blocks)",
        "self._index.restore(blocks)",
        "what an earlier process left is ready without a check",
    ),
    Mutant(
        "persisted-corrupt-stays",
        _PERSISTED,
        "            self._keeper.forget(slots)\n",
        "",
        "the record of a block that failed its check stands",
    ),
    Mutant(
        "persisted-any-bytes",
        _KEEPER,
        "self._hash(task.key, task.slot) == checksum",
        "True",
        "the check looks at nothing",
    ),
    Mutant(
        "persisted-record-stands",
        _KEEPER,
        "            self._states[slots] = FREE\n",
        "",
        "the record of a slot stands while another block is written there",
    ),
    Mutant(
        "persisted-reset-forgotten",
        _KEEPER,
        "        self._magic[0] = 0 ",
        "        pass ",
        "the next process finds what was reset",
    ),
]

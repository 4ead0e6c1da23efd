"""Valkey Cluster and Redis Cluster: one connection is connections to the nodes, each made when it is first needed.

A node that is lost costs the blocks in its slots, which are misses until another node has these slots or it is back.
The store is down only where no node answers.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence

from kvtier.keys import OffloadKey
from kvtier.tiers.shared.envelope import Identity
from kvtier.tiers.shared.resp import ErrorReply
from kvtier.tiers.shared.store import BlockTransfer, StoreRefusedError, StoreTimeoutError, StoreUnreachableError
from kvtier.tiers.shared.valkey_config import Address, ValkeyConfig, shown
from kvtier.tiers.shared.valkey_node import (
    ValkeyConnection,
    are_whole,
    connect_node,
    is_gone,
    refusal,
    touching,
    without,
)
from kvtier.tiers.shared.valkey_slots import MIN_PAUSE_S, ClusterMap, parse_slots, redirection, slots_of
from kvtier.tiers.shared.valkey_turns import Command, Each, Gets, Sets, Turn, Turns

MAX_ROUNDS = 6
"""So often one operation follows `MOVED` and `ASK`, or repeats what broke."""


class ValkeyCluster:
    """What the connections to one cluster share. `connect` may be called by any thread."""

    def __init__(self, config: ValkeyConfig) -> None:
        self._config = config
        self._map = ClusterMap(config.place, config.addresses)

    def connect(self, deadline_s: float, first: tuple[Address, ValkeyConnection] | None = None) -> ClusterConnection:
        """`first` is a connection to one of the nodes, where the caller has one; it belongs to the new one then."""
        connect_s = deadline_s - time.monotonic()
        connection = ClusterConnection(self._config, self._map, dict([first] if first else []), connect_s)
        try:
            connection.ping(deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection


class ClusterConnection:
    """A `StoreConnection`. `nodes`, connections to some of the nodes, belong to it. Connecting to a node takes
    `connect_s` at most."""

    def __init__(
        self,
        config: ValkeyConfig,
        cluster_map: ClusterMap,
        nodes: dict[Address, ValkeyConnection],
        connect_s: float,
    ) -> None:
        self._config = config
        self._map = cluster_map
        self._nodes = nodes
        self._connect_s = connect_s
        self._version = 0
        self._is_aborted = False

    def ping(self, deadline_s: float) -> None:
        """Some node answers, and says who has which slot."""
        self._ask_for_map(deadline_s)

    def lookup(self, identity: Identity, keys: Sequence[OffloadKey], block_bytes: int, deadline_s: float) -> list[bool]:
        """Where the owner of a slot is away, no block of it is there."""
        return are_whole(self._each(b"STRLEN", identity, keys, (), deadline_s), keys, block_bytes)

    def load(self, blocks: Sequence[BlockTransfer], deadline_s: float) -> None:
        self._exchange(Gets(blocks), blocks[0].identity, [block.key for block in blocks], deadline_s)

    def store(self, blocks: Sequence[BlockTransfer], overwrite: bool, deadline_s: float) -> None:
        identity = blocks[0].identity
        if not overwrite:
            keys = [block.key for block in blocks]
            blocks = without(blocks, self.lookup(identity, keys, blocks[0].buffer.nbytes, deadline_s))
        self._exchange(Sets(blocks), identity, [block.key for block in blocks], deadline_s)

    def remove(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        self._each(b"UNLINK", identity, keys, (), deadline_s)

    def touch(self, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        verb, more = touching(self._config)
        self._each(verb, identity, keys, more, deadline_s)

    def abort(self) -> None:
        self._is_aborted = True
        for node in list(self._nodes.values()):
            node.abort()

    def close(self) -> None:
        for address in list(self._nodes):
            self._drop(address)

    # -- commands, to whom they belong -----------------------------------------------------------------------

    def _each(
        self, verb: bytes, identity: Identity, keys: Sequence[OffloadKey], more: Sequence[bytes], deadline_s: float
    ) -> list[bytes]:
        """The lines of the replies to the same command for every key; empty where there was none."""
        command = Each(verb, identity, keys, more)
        self._exchange(command, identity, keys, deadline_s)
        return command.lines

    def _exchange(self, command: Command, identity: Identity, keys: Sequence[OffloadKey], deadline_s: float) -> None:
        """Has `command` done for all of its positions, which are those of `keys`: sent to all nodes, then read."""
        self._keep_map(deadline_s)
        slots = slots_of(self._config.prefix.encode() + identity.path, keys)
        turns = Turns(command, slots)
        owners = self._map.owners
        for position, slot in enumerate(slots):
            turns.add(owners[slot], False, position)
        for _ in range(MAX_ROUNDS):
            if not (current := turns.take()):
                break
            for turn in current:
                self._send(turn, turns, _share_s(deadline_s, len(current)))
            for turn in current:
                if turn.node is not None:
                    self._read(turn, turns, _share_s(deadline_s, len(current)))
        for turn in turns.take():
            command.give_up(turn.positions, "the nodes of the cluster send it from one to the other")
        if keys and not turns.has_answer and time.monotonic() < deadline_s - MIN_PAUSE_S:
            self._ask_for_map(deadline_s)  # raises where nobody is left

    def _send(self, turn: Turn, turns: Turns, deadline_s: float) -> None:
        """Leaves the turn without a node where that did not work."""
        if turn.address is None:
            self._map.note_stale()
            turns.give_up(turn, "no node has its slot")
            return
        turn.node = self._node(turn.address, deadline_s)
        if turn.node is None:
            turns.give_up(turn, self._map.absence(turn.address) or "there was no time left")
            return
        turn.node.limit(deadline_s)
        try:
            for positions in turn.portions():
                if turn.is_asking:
                    turn.node.send_asking()
                turns.command.send(turn.node, positions)
        except StoreUnreachableError as error:
            self._lose(turn, turns, error)

    def _read(self, turn: Turn, turns: Turns, deadline_s: float) -> None:
        assert turn.node is not None
        turn.node.limit(deadline_s)
        errors: list[tuple[int, ErrorReply]] = []
        try:
            for positions in turn.portions():
                if turn.is_asking:
                    turn.node.read_asked()
                errors += turns.command.read(turn.node, positions)
        except StoreUnreachableError as error:
            # those that were sent elsewhere are done there alone: two replies must not go into one buffer
            elsewhere = {position for position, _ in errors}
            turn.positions = [position for position in turn.positions if position not in elsewhere]
            self._lose(turn, turns, error)
        else:
            turns.has_answer = True
        for position, reply in errors:
            self._follow(turn, turns, position, reply)

    def _follow(self, turn: Turn, turns: Turns, position: int, reply: ErrorReply) -> None:
        """A node will not do this itself."""
        assert turn.address is not None
        target = redirection(reply, turn.address)
        if target is not None:
            if reply.code == "MOVED":
                self._map.note_moved(turns.slots[position], target)
            turns.add(target, reply.code == "ASK", position)
        elif is_gone(reply):
            self._map.note_stale()
            turns.command.give_up([position], f"the server says: {reply.text}")
        else:
            raise refusal(reply)

    def _lose(self, turn: Turn, turns: Turns, error: StoreUnreachableError) -> None:
        """The connection to a node broke. What was not done is done again once, unless that would take too long."""
        assert turn.address is not None
        self._raise_if_aborted()
        was_in_use = self._nodes.get(turn.address) is turn.node  # else another turn has lost it already
        if was_in_use:
            self._drop(turn.address)
        turn.node = None
        if isinstance(error, StoreTimeoutError) or (was_in_use and turn.address in turns.repeated):
            self._map.note_away(turn.address, str(error), time.monotonic())
            turns.give_up(turn, str(error))
            return
        turns.repeated.add(turn.address)
        for position in turns.command.undone(turn.positions):
            turns.add(turn.address, turn.is_asking, position)

    # -- nodes -----------------------------------------------------------------------------------------------

    def _node(self, address: Address, deadline_s: float) -> ValkeyConnection | None:
        """A connection to this node; None while it is away."""
        now_s = time.monotonic()
        if now_s >= deadline_s:
            return None
        if self._map.absence(address):
            if not self._map.take_turn_to_try(address, now_s):
                return None
            self._drop(address)
            deadline_s = now_s + (deadline_s - now_s) / 2  # others wait for this one, and it may well be away still
        try:
            node = self._nodes.get(address) or self._connect(address, deadline_s)
        except (StoreUnreachableError, StoreRefusedError) as error:
            self._raise_if_aborted()
            self._map.note_away(address, str(error), time.monotonic())
            return None
        self._map.note_back(address)
        return node

    def _connect(self, address: Address, deadline_s: float) -> ValkeyConnection:
        self._raise_if_aborted()
        deadline_s = min(deadline_s, time.monotonic() + self._connect_s)
        self._nodes[address] = node = connect_node(self._config, address, deadline_s)
        self._raise_if_aborted()  # after `abort` can see it
        if not node.is_clustered:
            self._drop(address)
            raise StoreRefusedError(f"{shown(address)} is no part of a cluster")
        return node

    def _raise_if_aborted(self) -> None:
        if self._is_aborted:
            raise StoreUnreachableError("it was broken off")

    def _drop(self, address: Address) -> None:
        node = self._nodes.pop(address, None)
        if node is not None:
            node.close()

    # -- the map ---------------------------------------------------------------------------------------------

    def _keep_map(self, deadline_s: float) -> None:
        """Asks for the map where that is known to be wrong, though not for long; closes connections to nodes that have
        left."""
        now_s = time.monotonic()
        if self._map.take_turn_to_ask(now_s):
            # where that does not work the operation itself will show what can be had
            with contextlib.suppress(StoreUnreachableError, StoreRefusedError):
                self._ask_for_map(now_s + (deadline_s - now_s) / 4)
        if self._version != self._map.version:
            self._version = self._map.version
            for address in self._nodes.keys() - set(self._map.addresses):
                self._drop(address)

    def _ask_for_map(self, deadline_s: float) -> None:
        """Of the first node that answers. Raises as a connection's methods do where none does."""
        failures: dict[Address, StoreUnreachableError | StoreRefusedError] = {}
        for address in self._by_hope():
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise StoreTimeoutError("no node of the cluster has answered in time")
            try:
                owners, addresses = self._slots_by(address, now_s + (deadline_s - now_s) / 2)
            except (StoreUnreachableError, StoreRefusedError) as error:
                self._drop(address)
                failures[address] = error
                continue
            self._map.note_back(address)
            for lost, failure in failures.items():
                self._map.note_away(lost, str(failure), now_s)
            self._map.update(owners, addresses, time.monotonic())
            return
        raise next(reversed(failures.values()))

    def _by_hope(self) -> list[Address]:
        """All nodes: those first that are likely to answer, and at once."""
        addresses = self._map.addresses
        random.shuffle(addresses)
        return sorted(addresses, key=lambda node: (bool(self._map.absence(node)), node not in self._nodes))

    def _slots_by(self, address: Address, deadline_s: float) -> tuple[list[Address | None], set[Address]]:
        node = self._nodes.get(address)
        if node is not None:
            try:
                return self._slots_over(node, address, deadline_s)
            except StoreTimeoutError:
                raise
            except StoreUnreachableError:  # a connection that was idle for long may be dead, and the node well
                self._drop(address)
        return self._slots_over(self._connect(address, deadline_s), address, deadline_s)

    def _slots_over(
        self, node: ValkeyConnection, address: Address, deadline_s: float
    ) -> tuple[list[Address | None], set[Address]]:
        node.limit(deadline_s)
        return parse_slots(node.call(b"CLUSTER", b"SLOTS"), address)


def _share_s(deadline_s: float, num_turns: int) -> float:
    """Until when a node has time, where others are to have their turn too."""
    now_s = time.monotonic()
    return deadline_s if num_turns == 1 else now_s + max(0.0, deadline_s - now_s) / 2

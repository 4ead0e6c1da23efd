"""What is done in one exchange with the nodes of a cluster: a command for many keys, and who does which part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.keys import OffloadKey
from kvtier.tiers.shared.envelope import Identity
from kvtier.tiers.shared.resp import ErrorReply
from kvtier.tiers.shared.store import BlockTransfer
from kvtier.tiers.shared.valkey_config import Address
from kvtier.tiers.shared.valkey_node import ValkeyConnection, is_about_server


class Command(Protocol):
    """Something to be done for many keys or blocks, named by their positions."""

    def undone(self, positions: Iterable[int]) -> list[int]: ...

    def send(self, node: ValkeyConnection, positions: list[int]) -> None: ...

    def read(self, node: ValkeyConnection, positions: list[int]) -> list[tuple[int, ErrorReply]]:
        """The replies. Returns those that say something of the node."""
        ...

    def give_up(self, positions: Iterable[int], reason: str) -> None: ...


class Each:
    """The same command for every key; replies are lines."""

    def __init__(self, verb: bytes, identity: Identity, keys: Sequence[OffloadKey], more: Sequence[bytes]) -> None:
        self.lines = [b""] * len(keys)
        self._verb, self._identity, self._keys, self._more = verb, identity, keys, more
        self._is_mixed = len(set(map(len, keys))) > 1

    def undone(self, positions: Iterable[int]) -> list[int]:
        return [position for position in positions if not self.lines[position]]

    def send(self, node: ValkeyConnection, positions: list[int]) -> None:
        if self._is_mixed:  # the order in which they are sent
            positions.sort(key=lambda position: len(self._keys[position]))
        node.send_each(self._verb, self._identity, [self._keys[position] for position in positions], self._more)

    def read(self, node: ValkeyConnection, positions: list[int]) -> list[tuple[int, ErrorReply]]:
        lines = node.read_each(len(positions))
        for position, line in zip(positions, lines, strict=True):
            self.lines[position] = line
        if not any(line.startswith(b"-") for line in set(lines)):
            return []
        errors = [(at, ErrorReply.of(line)) for at, line in zip(positions, lines, strict=True) if line[:1] == b"-"]
        errors = [(position, error) for position, error in errors if is_about_server(error)]
        for position, _ in errors:
            self.lines[position] = b""
        return errors

    def give_up(self, positions: Iterable[int], reason: str) -> None:
        pass


class Blocks:
    def __init__(self, blocks: Sequence[BlockTransfer]) -> None:
        self._blocks = blocks

    def undone(self, positions: Iterable[int]) -> list[int]:
        return [position for position in positions if not self._blocks[position].done]

    def give_up(self, positions: Iterable[int], reason: str) -> None:
        for position in self.undone(positions):
            self._blocks[position].lose(reason)


class Gets(Blocks):
    def send(self, node: ValkeyConnection, positions: list[int]) -> None:
        node.send_gets([self._blocks[position] for position in positions])

    def read(self, node: ValkeyConnection, positions: list[int]) -> list[tuple[int, ErrorReply]]:
        return [(at, error) for at in positions if (error := node.read_get(self._blocks[at]))]


class Sets(Blocks):
    def send(self, node: ValkeyConnection, positions: list[int]) -> None:
        for position in positions:
            node.send_set(self._blocks[position])

    def read(self, node: ValkeyConnection, positions: list[int]) -> list[tuple[int, ErrorReply]]:
        return [(at, error) for at in positions if (error := node.read_set(self._blocks[at]))]


@dataclass(slots=True)
class Turn:
    """What one node is to do in one round."""

    address: Address | None
    is_asking: bool
    """The slot is just moving to this node: every command needs `ASKING` before it."""
    positions: list[int]
    node: ValkeyConnection | None = None

    def portions(self) -> Iterator[list[int]]:
        """What is sent together."""
        if not self.is_asking:
            yield self.positions
        else:
            yield from ([position] for position in self.positions)


class Turns:
    """Who is to do what in the next round of one exchange."""

    def __init__(self, command: Command, slots: Sequence[int]) -> None:
        self.command = command
        self.slots = slots
        """Of each position."""
        self.repeated: set[Address] = set()
        """Nodes that were asked again because the connection broke."""
        self.has_answer = False
        self._next: dict[tuple[Address | None, bool], list[int]] = {}

    def add(self, address: Address | None, is_asking: bool, position: int) -> None:
        self._next.setdefault((address, is_asking), []).append(position)

    def take(self) -> list[Turn]:
        """The last of a node is the one that is not asking: its replies are read all at once."""
        current, self._next = self._next, {}
        turns = [Turn(address, is_asking, positions) for (address, is_asking), positions in current.items()]
        return sorted(turns, key=lambda turn: not turn.is_asking)

    def give_up(self, turn: Turn, reason: str) -> None:
        self.command.give_up(self.command.undone(turn.positions), reason)

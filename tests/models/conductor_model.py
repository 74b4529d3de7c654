"""The conductor's rules in plain Python, slow and simple.

Every holder (a backend and rank of a registered publisher, or a worker of the index) has names for
blocks. A block is its namespace and its sequence hash. After every event all names without a block
are tried again until nothing changes.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_intdigest as xxh3

Block = tuple[int, int]  # namespace, sequence hash
Name = tuple[int | None, int]  # namespace, or None for an engine's name in any; announced hash


def local_hash(tokens: Sequence[int], seed: int) -> int:
    return xxh3(struct.pack(f"<{len(tokens)}I", *tokens), seed=seed)


def next_hash(above: int | None, local: int, seed: int) -> int:
    return local if above is None else xxh3(struct.pack("<QQ", above, local), seed=seed)


def sequence_hashes(tokens: Sequence[int], block_size: int, seed: int) -> list[int]:
    found: list[int] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        local = local_hash(tokens[start : start + block_size], seed)
        found.append(next_hash(found[-1] if found else None, local, seed))
    return found


@dataclass
class Held:
    """A name whose block is known, with the media on which its holder has it."""

    block: Block
    media: set[str]


@dataclass
class Aside:
    """A name whose block is not known yet."""

    space: int
    hash: int
    media: set[str]
    parent: int | None = None  # None for names that were announced without tokens
    local: int | None = None
    sequence: int | None = None
    by_engine: bool = False


@dataclass(eq=False)
class Holder:
    instance: str
    source: object  # None for a worker
    home: int
    rank: int | None
    names: dict[Name, Held] = field(default_factory=dict)
    aside: dict[Name, Aside] = field(default_factory=dict)
    spaces: set[int] = field(default_factory=set)
    copies: Counter[tuple[Name, str]] = field(default_factory=Counter)  # beyond each first one

    def name(self, space: int, hash: int, by_engine: bool) -> Name:
        return (None if by_engine or space == self.home else space, hash)

    def held(self, space: int, hash: int, any_space: bool) -> Held | None:
        for name in ((None, hash), (space, hash)):
            held = self.names.get(name)
            if held is not None and (any_space or held.block[0] == space):
                return held
        return None

    def means(self, space: int, hash: int, any_space: bool) -> Block | None:
        held = self.held(space, hash, any_space)
        return None if held is None else held.block


class ConductorModel:
    def __init__(self, block_size: int, seed: int = 1337) -> None:
        self.block_size = block_size
        self.seed = seed
        self.holders: list[Holder] = []
        self.above: dict[Block, Block | None] = {}  # the block above, for every block ever placed

    # ---- what is known

    def alive(self) -> set[Block]:
        """Returns the blocks that have a name, and all blocks before them."""
        found: set[Block] = set()
        for holder in self.holders:
            for held in holder.names.values():
                block: Block | None = held.block
                while block is not None and block not in found:
                    found.add(block)
                    block = self.above[block]
        return found

    def meaning(self, asks: Holder, hash: int, space: int, any_space: bool) -> Block | None:
        nearer = [
            [asks],
            [each for each in self.holders if each.source is asks.source is not None],
            [each for each in self.holders if each.instance == asks.instance and each.source],
        ]
        for group in nearer:
            for holder in group:
                block = holder.means(space, hash, any_space)
                if block is not None:
                    return block
        others = {
            holder.means(space, hash, False)
            for holder in self.holders
            if holder.instance != asks.instance or holder.source is None
        } - {None}
        return others.pop() if len(others) == 1 else None

    def standard(self, asks: Holder, space: int, parent: int, local: int, hash: int) -> int | None:
        """Returns the sequence hash of a parent that is not a known name, None if it is unknown."""
        if next_hash(parent, local, self.seed) == hash:
            return parent
        sequences: set[int] = set()
        for holder in sorted(
            self.holders, key=lambda each: (each is not asks, each.instance != asks.instance)
        ):
            for aside in holder.aside.values():
                if (aside.space, aside.hash) == (space, parent) and aside.sequence is not None:
                    if holder.instance == asks.instance:
                        return aside.sequence
                    sequences.add(aside.sequence)
        return sequences.pop() if len(sequences) == 1 else None

    # ---- events

    def store(
        self,
        holder: Holder,
        medium: str,
        hashes: Sequence[int],
        tokens: Sequence[int],
        parent: int | None,
        space: int,
        by_engine: bool,
    ) -> None:
        size = self.block_size
        locals_ = [
            local_hash(tokens[i : i + size], self.seed)
            for i in range(0, len(tokens) - size + 1, size)
        ]
        hashes = hashes[: len(locals_)]
        block: Block | None = None
        known = parent is None
        above: int | None = None
        if parent is not None:
            block = self.meaning(holder, parent, space, by_engine)
            if block is None:
                above = self.standard(holder, space, parent, locals_[0], hashes[0])
                if above is not None and (space, above) in self.alive():
                    block = (space, above)
            known = block is not None
        holder.spaces.add(space)
        run: list[tuple[Name, bool]] = []  # placed names, and whether they were held before
        follows = parent is not None
        for i, (hash, local) in enumerate(zip(hashes, locals_, strict=True)):
            name = holder.name(space, hash, by_engine)
            if not known and name in holder.names:
                holder.names[name].media.add(medium)
                block, known, follows = holder.names[name].block, True, True
                continue
            if known:
                run.append((name, name in holder.names and medium in holder.names[name].media))
                block = self.place(holder, name, block, local, {medium}, space)
                continue
            above = None if above is None else next_hash(above, local, self.seed)
            aside = holder.aside.setdefault(name, Aside(space, hash, set(), by_engine=by_engine))
            aside.media.add(medium)
            if aside.local is None:
                aside.parent = parent if i == 0 else hashes[i - 1]
                aside.local, aside.sequence, aside.by_engine = local, above, by_engine
        again = [name for name, held in run if held]
        # An engine reuses blocks that it holds, but computes a prompt's last block again.
        if by_engine and (len(again) < len(run) or (len(run) == 1 and follows)):
            holder.copies.update((name, medium) for name in again)
        self.resolve_waiting()

    def place(
        self,
        holder: Holder,
        name: Name,
        above: Block | None,
        local: int,
        media: Iterable[str],
        space: int,
    ) -> Block:
        block = space, next_hash(None if above is None else above[1], local, self.seed)
        self.above[block] = above
        held = holder.names.setdefault(name, Held(block, set()))
        assert held.block == block
        held.media.update(media)
        if name in holder.aside:
            held.media.update(holder.aside.pop(name).media)
        return block

    def store_named(
        self, holder: Holder, medium: str, hashes: Iterable[int], space: int, by_engine: bool
    ) -> None:
        holder.spaces.add(space)
        for hash in hashes:
            name = holder.name(space, hash, by_engine)
            own = holder.held(space, hash, by_engine)
            if own is not None:
                own.media.add(medium)
                continue
            if name in holder.aside:
                holder.aside[name].media.add(medium)
                continue
            holder.aside[name] = Aside(space, hash, {medium}, sequence=hash, by_engine=by_engine)
            self.resolve_waiting()

    def resolve_waiting(self) -> None:
        """Places all names that can be placed."""
        changed = True
        while changed:
            changed = False
            for holder in self.holders:
                for name, aside in list(holder.aside.items()):
                    if name in holder.aside and self.try_place(holder, name, aside):
                        changed = True

    def try_place(self, holder: Holder, name: Name, aside: Aside) -> bool:
        space = aside.space
        if aside.local is None:
            block = self.meaning(holder, aside.hash, space, aside.by_engine)
            if block is None and (space, aside.hash) in self.alive():
                block = space, aside.hash
            if block is None:
                return False
            del holder.aside[name]
            holder.names[name] = Held(block, aside.media)
            return True
        assert aside.parent is not None
        above = self.meaning(holder, aside.parent, space, aside.by_engine)
        sequence = None
        if above is None:
            sequence = self.standard(holder, space, aside.parent, aside.local, aside.hash)
            if sequence is not None and (space, sequence) in self.alive():
                above = space, sequence
        if above is None and aside.sequence is not None:
            own = space, aside.sequence
            if own in self.alive():
                del holder.aside[name]
                holder.names[name] = Held(own, aside.media)
                return True
        if above is not None:
            del holder.aside[name]
            self.place(holder, name, above, aside.local, aside.media, space)
            return True
        if sequence is not None and aside.sequence is None:
            aside.sequence = next_hash(sequence, aside.local, self.seed)
            return True
        return False

    def remove(
        self, holder: Holder, medium: str | None, hash: int, space: int, by_engine: bool
    ) -> None:
        name = holder.name(space, hash, by_engine)
        if name not in holder.names and name not in holder.aside:
            if holder.means(space, hash, by_engine) is None:
                return
            name = (None, hash)
        if name in holder.names:
            held = holder.names[name]
            for each in held.media & ({medium} if medium is not None else held.media):
                if by_engine and holder.copies[name, each]:
                    holder.copies[name, each] -= 1
                else:
                    held.media.discard(each)
                    del holder.copies[name, each]
            if holder.source is None and not held.media:
                del holder.names[name]
        elif name in holder.aside:
            aside = holder.aside[name]
            aside.media -= aside.media if medium is None else {medium}
            if not aside.media:
                del holder.aside[name]

    def clear(self, holder: Holder, medium: str | None, space: int | None) -> None:
        several = len(holder.spaces) > 1
        if space is not None and not several and holder.spaces != {space}:
            return
        for name, each_medium in list(holder.copies):
            if medium in (None, each_medium) and (
                not several or space in (None, holder.names[name].block[0])
            ):
                del holder.copies[name, each_medium]
        if space is not None and several:
            for held in holder.names.values():
                if held.block[0] == space:
                    held.media -= held.media if medium is None else {medium}
            for name, aside in list(holder.aside.items()):
                if aside.space == space:
                    aside.media -= aside.media if medium is None else {medium}
                    if not aside.media:
                        del holder.aside[name]
            return
        for kept in (holder.names, holder.aside):
            for name, each in list(kept.items()):  # type: ignore[attr-defined]
                each.media -= each.media if medium is None else {medium}
                if not each.media:
                    del kept[name]
        if medium is None:
            holder.spaces.clear()

    # ---- questions

    def explain(self, tokens: Sequence[int], space: int) -> None:
        """Places blocks announced by sequence hash alone, whose tokens a prompt shows."""
        size = self.block_size
        block: Block | None = None
        for start in range(0, len(tokens) - size + 1, size):
            local = local_hash(tokens[start : start + size], self.seed)
            own = space, next_hash(None if block is None else block[1], local, self.seed)
            if own not in self.alive():
                waiting = (
                    (holder, name, aside)
                    for holder in self.holders
                    for name, aside in holder.aside.items()
                    if (aside.space, aside.sequence) == own
                )
                found = next(waiting, None)
                if found is None:
                    return
                holder, name, aside = found
                del holder.aside[name]
                self.place(holder, name, block, local, aside.media, space)
                self.resolve_waiting()
            block = own

    def rows(
        self, prompt: Sequence[int], space: int, registered: dict[str, set[int]]
    ) -> dict[str, dict[str, Any]]:
        """Returns the rows for a list of sequence hashes."""
        return {
            instance: self.row(instance, prompt, space, ranks)
            for instance, ranks in registered.items()
        }

    def on(self, holder: Holder, block: Block) -> set[str]:
        media: set[str] = set()
        for held in holder.names.values():
            if held.block == block:
                media |= held.media
        asides = [
            aside for aside in holder.aside.values() if (aside.space, aside.sequence) == block
        ]
        if asides and block not in self.alive():
            media = media.union(*(aside.media for aside in asides))
        return media

    def row(
        self, instance: str, prompt: Sequence[int], space: int, ranks: set[int]
    ) -> dict[str, Any]:
        holders = [each for each in self.holders if each.instance == instance]
        ranks = ranks | {each.rank for each in holders if each.rank is not None}
        size = self.block_size
        row: dict[str, Any] = {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {}}
        for rank in sorted(ranks):
            own_blocks = 0
            counts: dict[str, int] = {}
            depth = 0
            for sequence in prompt:
                block = space, sequence
                own: set[str] = set()
                shared: set[str] = set()
                for holder in holders:
                    if holder.rank == rank:
                        own |= self.on(holder, block)
                    elif holder.rank is None:
                        shared |= self.on(holder, block)
                if not own | shared:
                    break
                depth += 1
                own_blocks += bool(own)
                for medium in own | shared:
                    counts[medium] = counts.get(medium, 0) + 1
            row["DP"][str(rank)] = own_blocks * size
            row["longest_matched"] = max(row["longest_matched"], depth * size)
            for medium, count in counts.items():
                row[medium] = max(row.get(medium, 0), count * size)
        return row

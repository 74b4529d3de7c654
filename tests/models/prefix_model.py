"""A plain, slow prefix index with the rules of `kvd_core/index/index.hpp`.

A block is the tuple of local hashes from the root to it. A rank maps its name of a block to the
block and to the number of copies it has announced on each tier.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Path = tuple[int, ...]

GHOST = "ghost"


@dataclass
class Name:
    path: Path
    tiers: dict[object, int]  # tier -> copies; {GHOST: 1} for a remembered name


@dataclass
class Parked:
    content: tuple[int, int] | None  # (parent name, local hash)
    tiers: set[int]


@dataclass
class ModelRank:
    names: dict[int, Name] = field(default_factory=dict)
    parked: dict[int, Parked] = field(default_factory=dict)
    offloads: bool = False

    def store(self, names: list[int], local: list[int], parent: int | None, tier: int) -> None:
        mentioned = names + ([] if parent is None else [parent])
        if not names or len(set(mentioned)) != len(mentioned):
            return
        if parent is not None and parent not in self.names:
            self._park_run(names, local, parent, tier)
            return
        base: Path = () if parent is None else self.names[parent].path
        self._place(names, local, base, tier, single=len(names) == 1 and parent is not None)
        self._settle()

    def store_named(self, names: list[int], tier: int) -> None:
        for name in names:
            if name not in self.names:
                self.parked.setdefault(name, Parked(None, set())).tiers.add(tier)
            elif tier not in self.names[name].tiers:
                self._gain(name, tier)

    def drop(self, name: int, tier: int) -> None:
        known = self.names.get(name)
        if known is None or tier not in known.tiers:
            waiting = self.parked.get(name)
            if waiting is not None and tier in waiting.tiers:
                waiting.tiers.discard(tier)
                if not waiting.tiers:
                    del self.parked[name]
            return
        known.tiers[tier] -= 1
        if known.tiers[tier] == 0:
            del known.tiers[tier]
        if not known.tiers:
            if self.offloads:
                known.tiers[GHOST] = 1
            else:
                del self.names[name]

    def clear(self, tiers: set[int]) -> None:
        for name, known in list(self.names.items()):
            for tier in [*tiers, GHOST]:
                known.tiers.pop(tier, None)
            if not known.tiers:
                del self.names[name]
        for name, waiting in list(self.parked.items()):
            waiting.tiers -= tiers
            if not waiting.tiers:
                del self.parked[name]

    def holds(self, path: Path, tier: int) -> bool:
        return any(n.path == path and tier in n.tiers for n in self.names.values())

    def depths(self, local: list[int]) -> tuple[int, int, int]:
        """Returns the blocks matched on device, then through host, disk and external."""
        held: dict[int, set[Path]] = {tier: set() for tier in range(4)}
        for name in self.names.values():
            for tier in name.tiers:
                if tier != GHOST:
                    held[int(str(tier))].add(name.path)
        at, depths = 0, []
        for tier in range(4):
            while at < len(local) and tuple(local[: at + 1]) in held[tier]:
                at += 1
            depths.append(at)
        return depths[0], depths[1], depths[3]

    def _gain(self, name: int, tier: int) -> None:
        self.names[name].tiers.pop(GHOST, None)
        self.names[name].tiers[tier] = 1

    def _place(
        self, names: list[int], local: list[int], base: Path, tier: int, single: bool
    ) -> None:
        paths = [base + tuple(local[: i + 1]) for i in range(len(names))]
        for name, path in zip(names, paths, strict=True):
            if name in self.names and self.names[name].path != path:
                del self.names[name]
        held = [name in self.names and tier in self.names[name].tiers for name in names]
        if all(held) and not single:
            return
        for name, path, was in zip(names, paths, held, strict=True):
            if was:
                self.names[name].tiers[tier] += 1
            else:
                self.names.setdefault(name, Name(path, {}))
                self._gain(name, tier)

    def _park_run(self, names: list[int], local: list[int], parent: int, tier: int) -> None:
        for i, name in enumerate(names):
            if name in self.names:
                self.store_named([name], tier)
                self.store(names[i + 1 :], local[i + 1 :], name, tier)
                return
            waiting = self.parked.setdefault(name, Parked(None, set()))
            waiting.tiers.add(tier)
            if waiting.content is None:
                waiting.content = (parent if i == 0 else names[i - 1], local[i])

    def _settle(self) -> None:
        moved = True
        while moved:
            moved = False
            for name, waiting in list(self.parked.items()):
                if name in self.names:
                    for tier in waiting.tiers:
                        if tier not in self.names[name].tiers:
                            self._gain(name, tier)
                elif waiting.content is not None and waiting.content[0] in self.names:
                    path = (*self.names[waiting.content[0]].path, waiting.content[1])
                    self.names[name] = Name(path, dict.fromkeys(waiting.tiers, 1))
                else:
                    continue
                del self.parked[name]
                moved = True


def frequencies(ranks: list[ModelRank], local: list[int]) -> list[int]:
    """Returns, for each block of the longest device match, how many ranks hold it on device."""
    longest = max((rank.depths(local)[0] for rank in ranks), default=0)
    return [sum(rank.holds(tuple(local[: i + 1]), 0) for rank in ranks) for i in range(longest)]

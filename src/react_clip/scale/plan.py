"""The plan of a job: what was asked, and the parcels it comes to; the same plan means the same output.

Photos come first, in the order in which they were found, then shard after shard. A shard that cannot be read gets its
numbers later, when it can: parcels that were numbered keep their numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from react_clip.errors import ReactClipError
from react_clip.scale.files import SHARD_SUFFIXES, File, find
from react_clip.scale.parcels import Cut, Parcel, cut_shard

_READERS = 16
"""Shards whose headers are read at once; most of that time is waiting."""


@dataclass(frozen=True)
class Shard:
    """A tar or Parquet file and the pieces it is cut into."""

    file: File
    cuts: tuple[Cut, ...]


@dataclass(frozen=True)
class Plan:
    """What was asked of a job, and of which files."""

    asked: Mapping[str, Any]
    """All that decides what a row holds: sources, model, classes, defence, seed, sizes, version."""
    photos: tuple[File, ...]
    shards: tuple[Shard, ...]
    broken: Mapping[str, str]
    """Shards that cannot be read, and why."""

    @classmethod
    def make(cls, sources: Sequence[str], base: str, asked: Mapping[str, Any], earlier: Any = None) -> Self:
        """List the sources and cut them; shards that an ``earlier`` call numbered need no second look."""
        files = find(sources, base)
        shards = [file for file in files if file.suffix in SHARD_SUFFIXES]
        numbered = earlier["shards"] if isinstance(earlier, dict) and earlier.get("asked") == asked else []
        known = {File(url, size): tuple(map(tuple, cuts)) for url, size, cuts in numbered}
        fresh = [file for file in shards if file not in known]

        def attempt(file: File) -> tuple[Cut, ...] | str:
            try:
                return tuple(cut_shard(file, base, asked["parcel"], asked["column"]))
            except ReactClipError as error:
                return str(error)

        with ThreadPoolExecutor(_READERS) as pool:
            looked = dict(zip(fresh, pool.map(attempt, fresh), strict=True))
        listed = set(shards)
        kept = [Shard(file, cuts) for file, cuts in known.items() if file in listed]
        added = [Shard(file, cuts) for file, cuts in looked.items() if not isinstance(cuts, str)]
        photos = tuple(file for file in files if file.suffix not in SHARD_SUFFIXES)
        broken = {file.url: cuts for file, cuts in looked.items() if isinstance(cuts, str)}
        return cls(asked, photos, (*kept, *added), broken)

    @cached_property
    def identity(self) -> str:
        """A hash of what was asked; every part carries it."""
        return hashlib.sha256(json.dumps(self.asked, sort_keys=True).encode()).hexdigest()[:16]

    def parcels(self) -> Iterator[Parcel]:
        """The numbered parcels."""
        number, size = 0, self.asked["parcel"]
        for start in range(0, len(self.photos), size):
            urls = tuple(file.url for file in self.photos[start : start + size])
            yield Parcel(number, len(urls), urls)
            number += 1
        for shard in self.shards:
            for begin, end, count in shard.cuts:
                yield Parcel(number, count, (shard.file.url,), begin, end)
                number += 1

    def to_dict(self) -> dict[str, Any]:
        """As it is kept beside the parts; photos as one hash, or millions of them would be kept twice."""
        listing = hashlib.sha256()
        for file in self.photos:
            listing.update(f"{file.url}\0{file.size}\0".encode())
        photos = {"count": len(self.photos), "bytes": sum(file.size for file in self.photos)}
        shards = [[shard.file.url, shard.file.size, [list(cut) for cut in shard.cuts]] for shard in self.shards]
        return {
            "asked": dict(self.asked),
            "photos": {**photos, "sha256": listing.hexdigest()},
            "shards": shards,
            "broken": sorted(self.broken),
        }

    def continues(self, earlier: Any) -> list[str]:
        """In what this plan differs from an earlier one whose output it would continue; empty where it may."""
        ours, theirs = self.to_dict(), earlier if isinstance(earlier, dict) else {}
        before = theirs.get("asked", {})
        other = [name for name in {**ours["asked"], **before} if ours["asked"].get(name) != before.get(name)]
        if ours["photos"] != theirs.get("photos"):
            other.append("photos")
        # Shards that could not be read before may be whole now, and then have another length.
        numbered, waiting = theirs.get("shards", []), set(theirs.get("broken", ()))
        more = {url for url, *_ in ours["shards"][len(numbered) :]} | set(self.broken)
        if ours["shards"][: len(numbered)] != numbered or more != waiting:
            other.append("shards")
        return sorted(other)

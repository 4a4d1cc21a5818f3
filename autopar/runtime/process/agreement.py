"""Ranks check that they are about to do the same thing, before their first collective.

Everything goes through the c10d Store: plain keys, no pickle and no collective. So a rank that does
something else causes an error on every rank instead of a hang. Each rank posts its facts and counts
itself in. The last to arrive reads them all and writes one verdict, for whose key all wait. A rank
that fails posts its error, and the others raise that.

A wait ends when no rank was at work (`registry`) for the process group's timeout, or when an
awaited rank has ended. One of the waiting ranks checks for that, and writes the verdict for all.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from autopar import errors
from autopar.errors import AutoparError, PlanMismatchError, RankError
from autopar.ir.grouping import grouped
from autopar.runtime.process.hosts import ranks_text
from autopar.runtime.process.rank_registry import RankLocation, RankRegistry, guilty
from autopar.runtime.process.stack_lines import of_stack, script_line
from autopar.runtime.process.waits import BoundedStore

if TYPE_CHECKING:
    from autopar.runtime.process.world import World

CHUNK_BYTES = 1 << 20
LOOK_S = 1.0
"""How long a rank waits before it checks whether missing ranks can still come."""
_LINGER_S = 2.0
_GRACE_S = 2.0
"""How long the Store has for an answer once the time is up."""
_LATER_S = 5.0
"""How much later than the checking rank the others check themselves."""

_SHOWN_FACT = 160
_AGREED = "agreed"
_FAILURE = "failure"
_SERIAL = itertools.count()


class Agreement:
    """One rank's end of the agreement of all ranks of `registry` about one thing. `name` separates
    it from others over the same Store, and must be equal on all ranks. The Store's timeout
    applies."""

    def __init__(self, store: BoundedStore, registry: RankRegistry, *, name: str) -> None:
        self._store, self._registry = store, registry
        self._rank, self._size = registry.rank, registry.size
        self._prefix = f"autopar/{name}"

    def agree(self, topic: str, facts: Mapping[str, str]) -> None:
        """Return once every rank is here with the same `facts`.

        PlanMismatchError, on every rank, names the ranks that have other facts. RankError names
        those that have ended, or did not come in time. If a rank called `fail`, every rank raises
        its error.
        """
        with self._explaining(f"the others to agree on {topic}"):
            verdict = self._post(topic, facts)
        _raise_verdict(verdict)

    def fail(self, topic: str, error: BaseException) -> None:
        """Tell the others that this rank will not come to `agree(topic, ...)`, and why."""
        # If the Store is gone, the error that led here is the one to show.
        with suppress(RuntimeError):
            self._post_failure(topic, error)

    @contextmanager
    def telling(self, topic: str) -> Generator[None, None, None]:
        """If this rank fails inside, the others learn it where they agree on `topic`."""
        try:
            yield
        except Exception as error:
            self.fail(topic, error)
            raise

    def share(self, topic: str, make: Callable[[], bytes]) -> bytes:
        """The result of `make()` on rank 0, on every rank. If it raises there, all ranks raise. It
        may take longer than any timeout, as long as rank 0 answers meanwhile."""
        return self._send(topic, make) if self._rank == 0 else self._receive(topic)

    def _key(self, topic: str, leaf: str) -> str:
        return f"{self._prefix}/{topic}/{leaf}"

    @contextmanager
    def _explaining(self, awaited: str) -> Generator[None]:
        """If the Store is silent or gone, the error says what this rank waited for."""
        with self._registry.during(self._registry.phase, waits_in=f"a wait for {awaited}"):
            try:
                yield
            except RuntimeError as error:
                raise RankError(
                    f"rank {self._rank} waited for {awaited}{at_line()}, and "
                    f"{guilty(self._registry.call())}"
                ) from error

    def _post(self, topic: str, facts: Mapping[str, str]) -> str:
        """The verdict."""
        self._store.set(self._key(topic, f"facts/{self._rank}"), json.dumps(dict(facts)))
        verdict_key = self._key(topic, "verdict")
        if self._store.add(self._key(topic, "count"), 1) == self._size:
            verdict = self._write(verdict_key, self._judge(topic, range(self._size)))
        else:
            verdict = self._awaited(
                topic,
                verdict_key,
                f"to agree on {topic}",
                lambda rank: not self._has_come(topic, rank),
                _pack_error,
            )
        if verdict != _AGREED:
            self._linger(topic)
        return verdict

    def _post_failure(self, topic: str, error: BaseException) -> None:
        facts = json.dumps({_FAILURE: _pack_error(error)})
        self._store.set(self._key(topic, f"facts/{self._rank}"), facts, _GRACE_S)
        self._store.add(self._key(topic, "count"), 1, _GRACE_S)
        # A failure is a verdict at once: nobody should wait for the ranks still on their way.
        present = [rank for rank in range(self._size) if self._has_come(topic, rank)]
        self._write(self._key(topic, "verdict"), self._judge(topic, present))
        self._linger(topic)

    def _linger(self, topic: str) -> None:
        """Wait before an error is raised, which may end this process and, on rank 0, the Store with
        it."""
        key = self._key(topic, "read")
        with suppress(RuntimeError):
            num_read = self._store.add(key, 1, _GRACE_S)
            deadline = time.monotonic() + _LINGER_S
            while self._rank == 0 and num_read < self._size and time.monotonic() < deadline:
                time.sleep(0.01)
                num_read = self._store.add(key, 0, _GRACE_S)

    def _write(self, key: str, verdict: str) -> str:
        """The verdict that stands: the first one written."""
        return self._store.compare_set(key, "", verdict, _GRACE_S).decode()

    def _awaited(
        self,
        topic: str,
        key: str,
        to_do: str,
        lacks: Callable[[int], bool],
        pack: Callable[[RankError], str],
    ) -> str:
        """The value of `key`, once the ranks that it `lacks` have come `to_do` something. If they
        do not or cannot, it is their RankError, as `pack` writes it."""
        timeout_s = self._store.timeout_s
        until, work = time.monotonic() + timeout_s, -1
        while True:
            left_s = max(until - time.monotonic(), 0.0)
            if self._store.is_set(key, min(LOOK_S, left_s + 0.001), left_s + _GRACE_S):
                return self._store.get(key, _GRACE_S).decode()
            before, work = work, self._registry.work_done(left_s + _GRACE_S)
            if work != before:
                until = time.monotonic() + timeout_s
            is_late = time.monotonic() >= until
            if not self._is_to_look(topic, key, is_late=is_late):
                continue
            places = self._registry.call()
            missing = [place for place in places if lacks(place.rank)]
            if is_late or any(place.ended for place in missing):
                limit_s = timeout_s if is_late else None
                self._write(key, pack(RankError(_lost_text(missing or places, to_do, limit_s))))

    def _is_to_look(self, topic: str, key: str, *, is_late: bool) -> bool:
        """Whether this rank checks who is missing. The first to ask does; if that rank dies, all do
        in the end."""
        own = str(self._rank)
        looking = self._store.compare_set(self._key(topic, "looks"), "", own, _GRACE_S).decode()
        return looking == own or (is_late and not self._store.is_set(key, _LATER_S, _GRACE_S))

    def _has_come(self, topic: str, rank: int) -> bool:
        return self._store.check([self._key(topic, f"facts/{rank}")], _GRACE_S)

    def _judge(self, topic: str, present: Sequence[int]) -> str:
        raw = self._store.multi_get([self._key(topic, f"facts/{rank}") for rank in present])
        facts: list[dict[str, str]] = [json.loads(item) for item in raw]
        for rank, fact in zip(present, facts, strict=True):
            if _FAILURE in fact:
                return _blame(rank, fact[_FAILURE])
        text = _compare(topic, facts)
        return _pack_error(PlanMismatchError(text)) if text else _AGREED

    def _send(self, topic: str, make: Callable[[], bytes]) -> bytes:
        head = self._key(topic, "head")
        try:
            with self._registry.working():
                data = make()
        except BaseException as error:
            with suppress(RuntimeError):
                self._store.set(head, json.dumps({"error": _pack_error(error)}), _GRACE_S)
                self._linger(topic)
            raise
        num_chunks = -(-len(data) // CHUNK_BYTES)
        with self._explaining(f"the Store to take the {topic}"):
            for i in range(num_chunks):
                chunk = data[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]
                self._store.set(self._key(topic, f"chunk/{i}"), chunk.hex())
            self._store.set(head, json.dumps({"chunks": num_chunks, "digest": _digest(data)}))
        return data

    def _receive(self, topic: str) -> bytes:
        with self._explaining(f"rank 0 to send the {topic}"):
            head = json.loads(
                self._awaited(
                    topic,
                    self._key(topic, "head"),
                    f"to send the {topic}",
                    lambda rank: rank == 0,
                    lambda error: json.dumps({"lost": _pack_error(error)}),
                )
            )
            if "chunks" not in head:
                self._linger(topic)
                _raise_verdict(head.get("lost") or _blame(0, head["error"]))
            data = b"".join(
                bytes.fromhex(self._store.get(self._key(topic, f"chunk/{i}")).decode())
                for i in range(head["chunks"])
            )
        if _digest(data) != head["digest"]:
            raise PlanMismatchError(f"the {topic} of rank 0 arrived damaged at rank {self._rank}")
        return data


class SoleAgreement(Agreement):
    """That of a world of one rank, which agrees with itself."""

    def __init__(self) -> None:
        """There are no other ranks."""

    def agree(self, topic: str, facts: Mapping[str, str]) -> None:
        """Return."""

    def fail(self, topic: str, error: BaseException) -> None:
        """Nothing to post."""

    def share(self, topic: str, make: Callable[[], bytes]) -> bytes:
        """What `make()` returns."""
        return make()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def at_line() -> str:
    """Where the script is, to end a sentence with."""
    line = script_line(of_stack(sys._getframe()))
    return f", at {line}" if line else ""


def _lost_text(missing: Sequence[RankLocation], to_do: str, timeout_s: float | None) -> str:
    """The message on ranks that do not come `to_do` something, and where they are; with `timeout_s`
    if that is up."""
    who, reason = ranks_text([place.rank for place in missing if place.rank >= 0]), guilty(missing)
    line = script_line(of_stack(sys._getframe()))
    others = f" (who has come waits at {line})" if line else ""
    if timeout_s is None:
        return f"{who} cannot come {to_do}: {reason}{others}"
    return (
        f"{who} did not come {to_do} within {timeout_s:g} s: {reason}{others}; every rank must run "
        "the same script and make the same calls"
    )


def _pack_error(error: BaseException) -> str:
    """Class and text of an error; one that is not autopar's own travels as AutoparError."""
    if isinstance(error, AutoparError):
        return json.dumps([type(error).__name__, str(error)])
    return json.dumps(["AutoparError", f"{type(error).__name__}: {error}"])


def _blame(rank: int, packed: str) -> str:
    name, text = json.loads(packed)
    return json.dumps([name, f"rank {rank} failed: {text}"])


def _raise_verdict(verdict: str) -> None:
    if verdict == _AGREED:
        return
    name, text = json.loads(verdict)
    kind = getattr(errors, name, AutoparError)
    raise (kind if issubclass(kind, AutoparError) else AutoparError)(text)


def _compare(topic: str, facts: Sequence[Mapping[str, str]]) -> str:
    """Which ranks differ from the most common facts, and in what; empty if none does.

    Of equally common facts, those of the lowest rank are taken as the rule.
    """
    groups = grouped((json.dumps(fact, sort_keys=True), k) for k, fact in enumerate(facts))
    if len(groups) == 1:
        return ""
    rule = max(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    sentences = []
    for ranks in groups.values():
        if ranks is not rule:
            mine, theirs = facts[ranks[0]], facts[rule[0]]
            names = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
            what = "; ".join(f"{n}: {_show(mine.get(n))} and {_show(theirs.get(n))}" for n in names)
            verb = "differs" if len(ranks) == 1 else "differ"
            sentences.append(f"{ranks_text(ranks)} {verb} from {ranks_text(rule)} in {what}")
    return f"the ranks do not agree on {topic}: " + "; ".join(sentences)


def _show(fact: str | None) -> str:
    if fact is None:
        return "nothing"
    return fact if len(fact) <= _SHOWN_FACT else f"{fact[:_SHOWN_FACT]}..."


def make_agreement(world: World) -> Agreement:
    """A new agreement of all ranks, which must make equally many; a world of one agrees with
    itself."""
    if world.store is None or world.pre_step_check is None:
        return SoleAgreement()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Agreement(world.store, world.pre_step_check.registry, name=f"{attempt}/{next(_SERIAL)}")

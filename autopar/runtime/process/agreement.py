"""How ranks make sure that they are about to do the same thing, before their first collective.

Everything goes through the c10d Store: plain keys, no pickle and no collective, so that a rank that
went another way ends in an error on every rank instead of in a hang. Each rank posts its facts and
counts itself in; the last to arrive reads them all and writes one verdict; everybody waits for that
one key. A rank that fails says so, and the others stop with its words.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import Store

from autopar import errors
from autopar.errors import AutoparError, PlanMismatchError, listed
from autopar.runtime.torch_private import local_store

if TYPE_CHECKING:
    from autopar.runtime.process.world import World

CHUNK_BYTES = 1 << 20
AGREE_TIMEOUT_S = 60.0
SHARE_TIMEOUT_S = 3600.0
_LINGER_S = 2.0
_SHOWN_RANKS = 8
_SHOWN_FACT = 160
_AGREED = "agreed"
_FAILURE = "failure"
_SERIAL = itertools.count()


class Agreement:
    """One rank's end of the agreement of all `world_size` ranks about one thing.

    `name` tells it from other agreements over the same Store, and must be equal on all ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str,
        timeout_s: float = AGREE_TIMEOUT_S,
        share_timeout_s: float = SHARE_TIMEOUT_S,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._prefix = f"autopar/{name}"
        self._timeout_s = timeout_s
        self._share_timeout_s = share_timeout_s

    def agree(self, topic: str, facts: Mapping[str, str]) -> None:
        """Return when every rank has come here with the same `facts`.

        PlanMismatchError, on every rank, names the ranks that have other facts or that did not come
        within the time limit. If a rank came with `fail`, every rank raises its error.
        """
        self._post(topic, facts)

    def fail(self, topic: str, error: BaseException) -> None:
        """Tell the others that this rank will not come to `agree(topic, ...)`, and why."""
        try:
            self._post(topic, {_FAILURE: _pack_error(error)}, wait=False)
        except RuntimeError:
            return  # The Store is gone; the error that led here is the one to show.

    @contextmanager
    def telling(self, topic: str) -> Generator[None, None, None]:
        """If this rank fails inside, the others learn it where they agree on `topic`."""
        try:
            yield
        except Exception as error:
            self.fail(topic, error)
            raise

    def share(self, topic: str, make: Callable[[], bytes]) -> bytes:
        """What `make()` returns on rank 0, on every rank. If it raises there, all ranks raise."""
        return self._send(topic, make) if self._rank == 0 else self._receive(topic)

    def _key(self, topic: str, leaf: str) -> str:
        return f"{self._prefix}/{topic}/{leaf}"

    def _post(self, topic: str, facts: Mapping[str, str], *, wait: bool = True) -> None:
        self._store.set(self._key(topic, f"facts/{self._rank}"), json.dumps(dict(facts)))
        verdict_key = self._key(topic, "verdict")
        if self._store.add(self._key(topic, "count"), 1) == self._world_size or not wait:
            # A failure is a verdict at once: nobody should wait for the ranks still on their way.
            verdict = self._write_verdict(topic, self._judge(topic, partial=not wait))
        elif self._wait(verdict_key, self._timeout_s):
            verdict = self._store.get(verdict_key).decode()
        else:
            verdict = self._verdict_after_timeout(topic)
        if verdict != _AGREED:
            self._linger(topic)
        if wait:
            _raise_verdict(verdict)

    def _linger(self, topic: str) -> None:
        """Before an error is raised: it may end this process and, on rank 0, the Store with it."""
        key = self._key(topic, "read")
        num_read = self._store.add(key, 1)
        deadline = time.monotonic() + _LINGER_S
        while self._rank == 0 and num_read < self._world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            num_read = self._store.add(key, 0)

    def _wait(self, key: str, timeout_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError:
            return bool(self._store.check([key]))
        return True

    def _write_verdict(self, topic: str, verdict: str) -> str:
        """The verdict that stands: the first one written."""
        return self._store.compare_set(self._key(topic, "verdict"), "", verdict).decode()

    def _verdict_after_timeout(self, topic: str) -> str:
        """One of those whose time is up looks who is missing; if it dies on the way, each does."""
        scanner = self._store.compare_set(self._key(topic, "scanner"), "", str(self._rank))
        verdict_key = self._key(topic, "verdict")
        if scanner.decode() != str(self._rank) and self._wait(verdict_key, 5.0):
            return self._store.get(verdict_key).decode()
        missing = [r for r in range(self._world_size) if not self._has_come(topic, r)]
        text = (
            f"{_ranks(missing)} did not come to agree on {topic} within {self._timeout_s:g} s: "
            "see what they print; every rank must run the same script and make the same calls"
        )
        return self._write_verdict(topic, _pack_error(PlanMismatchError(text)))

    def _has_come(self, topic: str, rank: int) -> bool:
        return bool(self._store.check([self._key(topic, f"facts/{rank}")]))

    def _judge(self, topic: str, *, partial: bool) -> str:
        ranks = range(self._world_size)
        present = [r for r in ranks if self._has_come(topic, r)] if partial else list(ranks)
        keys = [self._key(topic, f"facts/{r}") for r in present]
        raw = self._store.multi_get(keys)
        facts: list[dict[str, str]] = [json.loads(item) for item in raw]
        for rank, fact in zip(present, facts, strict=True):
            if _FAILURE in fact:
                return _blame(rank, fact[_FAILURE])
        text = _compare(topic, facts)
        return _pack_error(PlanMismatchError(text)) if text else _AGREED

    def _send(self, topic: str, make: Callable[[], bytes]) -> bytes:
        head = self._key(topic, "head")
        try:
            data = make()
        except BaseException as error:
            self._store.set(head, json.dumps({"error": _pack_error(error)}))
            self._linger(topic)
            raise
        num_chunks = -(-len(data) // CHUNK_BYTES)
        for i in range(num_chunks):
            chunk = data[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]
            self._store.set(self._key(topic, f"chunk/{i}"), chunk.hex())
        self._store.set(head, json.dumps({"chunks": num_chunks, "digest": _digest(data)}))
        return data

    def _receive(self, topic: str) -> bytes:
        head_key = self._key(topic, "head")
        self._poll(topic, head_key)
        head = json.loads(self._store.get(head_key))
        if "error" in head:
            self._linger(topic)
            _raise_verdict(_blame(0, head["error"]))
        data = b"".join(
            bytes.fromhex(self._store.get(self._key(topic, f"chunk/{i}")).decode())
            for i in range(head["chunks"])
        )
        if _digest(data) != head["digest"]:
            raise PlanMismatchError(f"the {topic} of rank 0 arrived damaged at rank {self._rank}")
        return data

    def _poll(self, topic: str, key: str) -> None:
        """Wait long, but in naps, so that Ctrl-C works."""
        deadline, nap_s = time.monotonic() + self._share_timeout_s, 0.005
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise PlanMismatchError(
                    f"rank 0 sent no {topic} within {self._share_timeout_s:g} s: see what it prints"
                )
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, 0.25)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


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
    groups: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        groups.setdefault(json.dumps(fact, sort_keys=True), []).append(rank)
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
            sentences.append(f"{_ranks(ranks)} {verb} from {_ranks(rule)} in {what}")
    return f"the ranks do not agree on {topic}: " + "; ".join(sentences)


def _show(fact: str | None) -> str:
    if fact is None:
        return "nothing"
    return fact if len(fact) <= _SHOWN_FACT else f"{fact[:_SHOWN_FACT]}..."


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks, _SHOWN_RANKS)}"


def make_agreement(world: World) -> Agreement:
    """A new agreement; a world of one agrees with itself."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{restart}/{next(_SERIAL)}"
    return Agreement(world.store or local_store(), world.rank, world.size, name=name)

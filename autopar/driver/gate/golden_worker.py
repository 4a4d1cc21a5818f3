"""A golden plan recomputed, in a process of its own: this alone runs the target's code."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.driver.gate import plan_cache
from autopar.driver.gate.recipe import Recipe
from autopar.driver.target import load_target
from autopar.errors import AutoparWarning, sentence
from autopar.ir.fingerprint import fingerprint
from autopar.plans.plan import Plan

if TYPE_CHECKING:
    from autopar.tracer import Traced


@dataclass(frozen=True, slots=True)
class Replanned:
    """A plan as a file has it, or the reason why there is none."""

    plan: bytes = b""
    error: str = ""
    from_cache: bool = False
    warnings: tuple[str, ...] = ()


def serve(connection: Connection, recipe: Recipe, cache: Path | None) -> None:
    """Send the result of `make`. Whatever the target prints goes to standard error: the result of
    the command is alone on standard output."""
    sys.stdout.flush()
    os.dup2(2, 1)
    connection.send(make(recipe, cache))
    connection.close()


def make(recipe: Recipe, cache: Path | None) -> Replanned:
    """The plan of `recipe`. The model is traced in any case, so that a change of it shows. The plan
    is solved unless `cache` has it."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", AutoparWarning)
        try:
            plan, from_cache = _plan(recipe, cache)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return Replanned(error=sentence(error))
    messages = dict.fromkeys(
        str(w.message) for w in heard if issubclass(w.category, AutoparWarning)
    )
    return Replanned(plan.to_bytes(), from_cache=from_cache, warnings=tuple(messages))


def _plan(recipe: Recipe, cache: Path | None) -> tuple[Plan, bool]:
    os.chdir(recipe.root)
    sys.path.insert(0, str(recipe.root))
    from autopar.compile import plan_call
    from autopar.driver.planning import (
        answer,
        call_on,
        check_outputs,
        describe_cluster,
        make_call_request,
    )
    from autopar.runtime.module.building import build

    built = build(load_target(recipe.target), recipe.global_batch, on_meta=True)
    cluster = describe_cluster(recipe.cluster, recipe.profile)
    call = call_on(built.model, built.inputs, recipe.options)

    def find(traced: Traced) -> tuple[Plan, bool]:
        check_outputs(traced, recipe.options)
        graph_request = make_call_request(call, traced, cluster)
        digest = graph_request.digest()
        cached = plan_cache.find(cache, digest, fingerprint(graph_request.graph)) if cache else None
        if cached is not None:
            return cached, True
        plan = answer(graph_request, lambda _: None)
        if cache:
            plan_cache.keep(cache, digest, plan)
        return plan, False

    return plan_call(call, find)[1]

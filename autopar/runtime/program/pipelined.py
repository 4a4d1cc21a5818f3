"""The step of a pipeline on one rank: its stages' microbatches in the order of its row of the
pipeline schedule.

Results are shared at the end of the step. Losses and other whole results go from their stage to all
ranks. The copies of a tied weight add up their gradients. Outputs in shards and gradients stay on
their stage; ranks of other stages have empty tensors for them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.passes.stages import StageLink
from autopar.ir.pipeline import Action, Pass, PipelineSchedule
from autopar.runtime.process.own_group import broadcast
from autopar.runtime.process.pre_step_check import PreStepCheck
from autopar.runtime.program.function import Step
from autopar.runtime.program.microbatch_run import (
    Around,
    Graphs,
    MicrobatchedStep,
    MicrobatchNames,
    MicrobatchRun,
    TensorValues,
    at_once,
)
from autopar.runtime.program.program import Program
from autopar.runtime.program.random import DefaultRandom
from autopar.runtime.program.stage_messages import (
    RANDOM,
    Channels,
    Exchanges,
    RankLinks,
    StageMessages,
)


class Leaving(NamedTuple):
    """A result of the step or a gradient, by its name in `Program`. `source` is the rank that sends
    it to the others; if that is None, ranks without it have nothing of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    source: int | None = None

    def empty(self) -> Tensor:
        """The tensor on a rank that has nothing of it."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def blank(self) -> Tensor:
        """Memory for all of it."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class CopiedGradient(NamedTuple):
    """The gradient of a tied weight, of which this rank has a shard of `shape`: each process of
    `group` has the terms of its stages. For a script's tensor, `group` is all ranks, and only one
    of those with the same terms `counts`."""

    group: dist.ProcessGroup | None
    shape: tuple[int, ...]
    counts: bool = True


class RandomMicrobatches(NamedTuple):
    """Stages that draw random numbers, in their order, and the `links` by which each sends its
    random state to the next. `source` is the rank that sends the last state to all others."""

    stages: tuple[int, ...]
    links: tuple[StageLink, ...]
    source: int


@dataclass(frozen=True)
class RankSchedule:
    """A pipeline on one rank. `programs` and `graphs` are those of its stages, bound; `inputs` are
    those of all stages; `copies` has the gradients of which this rank has one of several terms."""

    actions: PipelineSchedule
    route: RankLinks
    channels: Channels | None
    programs: Mapping[int, Program]
    graphs: Mapping[int, Graphs]
    inputs: tuple[str, ...]
    results: tuple[Leaving, ...]
    gradients: tuple[Leaving, ...]
    copies: Mapping[str, CopiedGradient]
    random: RandomMicrobatches | None
    tangent_dtypes: Mapping[str, str]
    is_proportional: bool
    device: torch.device
    pre_step_check: PreStepCheck | None = None
    done: set[tuple[Pass, ...]] = field(default_factory=set, init=False)
    """Sets of kinds of actions that have run before."""
    _exchanges: dict[tuple[Pass, ...], Exchanges] = field(default_factory=dict, init=False)

    def exchanges(self, kinds: Sequence[Pass]) -> Exchanges:
        """The messages while ranks do the actions of these kinds."""
        key = tuple(kinds)
        if key not in self._exchanges:
            rows = tuple(tuple(a for a in row if a.kind in kinds) for row in self.actions.rows)
            self._exchanges[key] = Exchanges(self.route, rows)
        return self._exchanges[key]

    @property
    def names(self) -> MicrobatchNames:
        """The names of the step's inputs and results here."""
        return MicrobatchNames(
            self.inputs,
            tuple(each.name for each in self.results),
            tuple(each.name for each in self.gradients),
            self.tangent_dtypes,
            self.is_proportional,
            self.random is not None,
        )


class _Pass:
    """One run of the pipeline schedule, or of its forwards or backwards alone."""

    def __init__(
        self, schedule: RankSchedule, given: Mapping[str, Any], tangents: Mapping[str, Any] | None
    ) -> None:
        self.schedule = schedule
        self.random = DefaultRandom(schedule.device)
        self.draws = True
        """Whether graphs may draw random numbers: those of backward do not."""
        self.states: dict[int, Tensor] = {}
        """The random state that each drawing stage starts from, and behind the last one its final
        state."""
        if schedule.random is not None:
            self.states[schedule.random.stages[0]] = self.random.now()
        values, table = TensorValues(schedule.device), schedule.actions
        self.runs = {
            stage: MicrobatchRun(
                program,
                schedule.graphs[stage],
                values,
                given,
                tangents,
                self._around(stage),
                table.last_microbatches(stage),
            )
            for stage, program in schedule.programs.items()
        }

    def do(self, kinds: Sequence[Pass]) -> None:
        """Run all actions of these kinds. The receives of the next action are posted before the
        present one, once graphs are compiled and if the messages can arrive by then. On a GPU a
        receive is a kernel that waits on the device. It would block a compiler that tunes kernels,
        and so waits for all of the device."""
        schedule = self.schedule
        is_first = tuple(kinds) not in schedule.done
        self.draws = Pass.FORWARD in kinds
        exchanges = schedule.exchanges(kinds)
        messages = StageMessages(exchanges, schedule.channels, schedule.device, self._awaiting)
        own = exchanges.own
        try:
            for place, action in enumerate(own):
                messages.expect(action)
                for later in own[place + 1 : place + 2]:
                    if not is_first and later not in exchanges.answers:
                        messages.expect(later)
                self._act(messages, action)
            messages.finish()
            schedule.done.add(tuple(kinds))
        except BaseException:
            if schedule.channels is not None:
                schedule.channels.break_off()
            raise

    def _act(self, messages: StageMessages, action: Action) -> None:
        stage, kind, microbatch = action
        run = self.runs[stage]
        if kind is Pass.WEIGHTS:
            if run.has_backward:
                run.weights(microbatch)
            return
        received = messages.take(action)
        if RANDOM in received:
            self.states[stage] = received.pop(RANDOM).cpu()
        # The only references, which are released once they are read.
        named = {f"received:{name}": received.pop(name) for name in list(received)}
        does = {Pass.FORWARD: run.forward, Pass.BACKWARD: run.backward}[kind]
        sent = does(microbatch, named) if kind is Pass.FORWARD or run.has_backward else {}
        links = (send_plan.link for send_plan in messages.exchanges.sends[action])
        outgoing = {
            link: self.states[link.target].to(self.schedule.device)
            if link.name == RANDOM
            else sent[f"sent:{link.target}:{link.name}"]
            for link in links
        }
        messages.give(action, outgoing)

    def _around(self, stage: int) -> Around:
        """The context of the graphs of a stage: each microbatch draws as the whole batch would,
        from the random state of the stage before it after a microbatch."""
        random = self.schedule.random
        if random is None or stage not in random.stages:
            return at_once
        behind = (*random.stages[1:], -1)[random.stages.index(stage)]

        @contextmanager
        def inside(_: bool) -> Generator[None]:
            if not self.draws:
                yield
                return
            with self.random.replayed(self.states[stage]):
                yield
                self.states.setdefault(behind, self.random.now())

        return inside

    def _awaiting(
        self, action: Action, link: StageLink | None, peer: int
    ) -> AbstractContextManager[None]:
        pre_step_check = self.schedule.pre_step_check
        words = {Pass.FORWARD: "forward", Pass.BACKWARD: "backward"}
        if pre_step_check is None:
            return nullcontext()
        phase = f"{words[action.kind]} of microbatch {action.microbatch} in stage {action.stage}"
        if link is None:
            return pre_step_check.awaiting("end of the step", f"rank {peer} to read the {phase}")
        return pre_step_check.awaiting(
            phase, f"{link.name} of stage {link.source} from rank {peer}"
        )

    def results(self) -> dict[str, Any]:
        """The results of all stages. Random numbers go on from the state of the last stage. A
        collective call."""
        own = {name: x for run in self.runs.values() for name, x in run.results.items()}
        with self._sharing():
            shared = {each.name: self._shared(each, own.get(each.name))
                     for each in self.schedule.results}  # fmt: skip
            if self.schedule.random is not None:
                state = self.states.get(-1, self.random.now()).to(self.schedule.device)
                self._broadcast(state, self.schedule.random.source)
                self.random.go_on_from(state.cpu())
        return shared

    def gradients(self) -> dict[str, Any]:
        """The gradients of this rank's parameters. A collective call."""
        gradients: dict[str, Tensor] = {}
        for run in self.runs.values():
            for name, gradient in run.gradients.items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        with self._sharing():
            for each in self.schedule.gradients:
                copied = self.schedule.copies.get(each.name)
                if copied is not None:
                    zeros = torch.zeros(copied.shape, dtype=each.dtype, device=each.device)
                    own = gradients.setdefault(each.name, zeros) if copied.counts else zeros
                    gradients[each.name] = own
                    # A parameter may live on the host.
                    on_device = own.to(self.schedule.device)
                    dist.all_reduce(on_device, group=copied.group)
                    own.copy_(on_device)
        return {
            each.name: gradients[each.name] if each.name in gradients else each.empty()
            for each in self.schedule.gradients
        }

    def _sharing(self) -> AbstractContextManager[None]:
        pre_step_check = self.schedule.pre_step_check
        if pre_step_check is None:
            return nullcontext()
        return pre_step_check.awaiting("end of the step", "what all stages share")

    def _shared(self, each: Leaving, term: Tensor | None) -> Tensor:
        if each.source is None:
            return each.empty() if term is None else term
        value = each.blank() if term is None else term.contiguous()
        self._broadcast(value, each.source)
        return value

    def _broadcast(self, value: Tensor, source: int) -> None:
        if self.schedule.pre_step_check is not None:
            broadcast(value, source)


def make_pipelined_step(
    schedule: RankSchedule, timed: Callable[[str, Any], Any], **shown: Any
) -> Step:
    """The step of a pipeline, whose passes are `timed`; `shown` are further arguments of `Step`."""
    names, has_backward = schedule.names, bool(schedule.gradients)
    if has_backward and any(program.microbatches > 1 for program in schedule.programs.values()):
        whole = MicrobatchedStep(names, partial(run_rank_schedule, schedule), schedule.device)
    else:
        whole = _Once(schedule)
    return Step(
        forward=timed("forward", whole.forward),
        backward=timed("backward", whole.backward) if has_backward else None,
        inference=timed("forward", whole.inference),
        forward_inputs=names.inputs,
        forward_outputs=names.results + whole.saved,
        backward_inputs=(*whole.saved, *names.tangent_dtypes),
        backward_outputs=names.gradients,
        **shown,
    )


def run_rank_schedule(
    schedule: RankSchedule, given: Mapping[str, Any], tangents: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(results, gradients) of a step in microbatches."""
    step_pass = _Pass(schedule, given, tangents)
    step_pass.do([Pass.FORWARD] if tangents is None else list(Pass))
    return step_pass.results(), {} if tangents is None else step_pass.gradients()


class _Once:
    """A step of one microbatch, whose backward runs with its incoming gradients."""

    def __init__(self, schedule: RankSchedule) -> None:
        self.schedule = schedule
        self._saved = [
            (stage, name)
            for stage, program in schedule.programs.items()
            for name in program.forward_outputs
            if name.startswith("saved:") and schedule.gradients
        ]
        self.saved = tuple(f"saved:{stage}:{name}" for stage, name in self._saved)

    def inference(self, inputs: list[Any]) -> list[Tensor]:
        """The results alone."""
        given = dict(zip(self.schedule.inputs, inputs, strict=True))
        inputs.clear()
        results, _ = run_rank_schedule(self.schedule, given, None)
        return [results[each.name] for each in self.schedule.results]

    def forward(self, inputs: list[Any]) -> list[Tensor]:
        """The results, then the `saved` tensors."""
        given = dict(zip(self.schedule.inputs, inputs, strict=True))
        inputs.clear()
        # Empty tangents, not None: there will be a backward, with tangents of its own.
        step_pass = _Pass(self.schedule, given, {})
        step_pass.do([Pass.FORWARD])
        results = step_pass.results()
        saved = [step_pass.runs[stage].saved[0][name] for stage, name in self._saved]
        return [*(results[each.name] for each in self.schedule.results), *saved]

    def backward(self, inputs: list[Any]) -> list[Tensor]:
        """The gradients, from the saved tensors and the tangents behind them."""
        num = len(self._saved)
        saved, given = inputs[:num], inputs[num:]
        inputs.clear()
        tangents = dict(zip(self.schedule.tangent_dtypes, given, strict=True))
        step_pass = _Pass(self.schedule, {}, tangents)
        for run in step_pass.runs.values():
            run.saved[0] = {}
        for (stage, name), value in zip(self._saved, saved, strict=True):
            step_pass.runs[stage].saved[0][name] = value
        saved.clear()
        step_pass.do([Pass.BACKWARD, Pass.WEIGHTS])
        gradients = step_pass.gradients()
        return [gradients[each.name] for each in self.schedule.gradients]

"""Any model can be given, on any device; it comes back untouched, and failures say where."""

from __future__ import annotations

import inspect
import io
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from tqdm import tqdm

from autopar.errors import SideEffectWarning, TraceError, UnknownOpWarning
from autopar.ir.graph import Ref
from autopar.tracer import trace
from tests.tracer.execute import run
from tests.tracer.models import gpt2, llama, mlp, token_inputs

ROOT = Path(__file__).resolve().parents[2]


def state_of(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module, by identity."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, dict):
                found |= {f"{path}.{name}.{k}": id(v) for k, v in value.items()}
            else:
                found[f"{path}.{name}"] = id(value)
    return found


def configs_of(model: Any) -> tuple[Any, ...]:
    return (model.config._attn_implementation, model.config.use_cache, model.config.to_dict())


@pytest.mark.parametrize("build", [gpt2, llama])
def test_the_model_comes_back_untouched(build: Any) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = build()
    before, configs = state_of(model), configs_of(model)
    trace(model, (), token_inputs())
    assert state_of(model) == before
    assert configs_of(model) == configs
    assert "autopar" not in ALL_ATTENTION_FUNCTIONS


class Remembers(nn.Module):
    """Keeps what it computed, then may fail."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails = fails
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        self.register_buffer("cache", self.last)
        if self.fails:
            raise RuntimeError("no luck")
        return self.last


@pytest.mark.parametrize("fails", [False, True])
def test_what_forward_leaves_on_the_model_is_removed(fails: bool) -> None:
    model = Remembers(fails)
    before = state_of(model)
    if fails:
        with pytest.raises(TraceError, match="RuntimeError: no luck"):
            trace(model, (torch.randn(2, 4),))
    else:
        with pytest.warns(
            SideEffectWarning, match="leaves tensors in last of the model|replaces cache"
        ):
            trace(model, (torch.randn(2, 4),))
    assert state_of(model) == before
    assert model.last is None


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum().item() > 0:
            y = -y
        return y


def test_control_flow_on_data_names_module_line_and_cure() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Decides())
    line = inspect.getsourcelines(Decides.forward)[1] + 2
    with pytest.raises(TraceError) as caught:
        trace(model, (torch.randn(2, 4),))
    text = str(caught.value)
    assert "module '1'" in text
    assert f"{Path(__file__).name}:{line}: if y.sum().item() > 0:" in text
    assert "torch.where" in text


def test_experts_that_count_their_tokens_are_told_of_the_op() -> None:
    model = nn.Sequential()
    model.add_module("experts", Decides())
    with pytest.raises(TraceError, match=r"autopar\.experts \(docs/experts\.md\)"):
        trace(model, (torch.randn(2, 4),))


class Averages(nn.BatchNorm1d):
    """Averages its means by itself; as a number, or as a tensor."""

    by_tensor = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert self.num_batches_tracked is not None and self.running_mean is not None
        self.num_batches_tracked.add_(1)
        share = 1 / (
            self.num_batches_tracked if self.by_tensor else float(self.num_batches_tracked)
        )
        with torch.no_grad():
            self.running_mean.lerp_(input.mean(0), share)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return input - self.running_mean


def test_a_norm_that_averages_all_batches_by_itself_is_named_with_the_cure() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Averages(4, momentum=None))
    with pytest.raises(TraceError, match=r"module '1'.*\n.*lerp_\(mean, 1 / num_batches_tracked\)"):
        trace(model, (torch.randn(5, 3),))
    Averages.by_tensor = True
    assert trace(model, (torch.randn(5, 3),)).graph.nodes


def test_norms_that_average_all_batches_are_traced_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None))
    forward = nn.BatchNorm1d.forward
    assert trace(model, (torch.randn(5, 3),)).graph.nodes
    assert nn.BatchNorm1d.forward is forward and model[1].momentum is None


def test_inputs_that_require_grad_are_refused() -> None:
    with pytest.raises(TraceError, match="tensor 0 of the model's inputs requires grad"):
        trace(mlp(), (torch.randn(2, 8, requires_grad=True),))


class ChangesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def test_inputs_changed_in_place_are_refused() -> None:
    told = r"module '1' changes one of the model's inputs in place \(args\[0\]\)"
    with pytest.raises(TraceError, match=told):
        trace(nn.Sequential(nn.Identity(), ChangesInput()), (torch.randn(2, 8),))


class Opaque:
    """A result that torch cannot look into."""


class ReturnsOpaque(nn.Module):
    def forward(self, x: Tensor) -> Opaque:
        return Opaque()


def test_outputs_that_cannot_be_looked_into_are_refused() -> None:
    with pytest.raises(TraceError, match=r"returns a Opaque.*register_dataclass"):
        trace(ReturnsOpaque(), (torch.randn(2, 8),))


@torch.library.custom_op("autopar_tests::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    return x.clone()


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Mystery(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return mystery(mystery(x))


def test_unknown_ops_are_named_once_and_have_no_factors() -> None:
    model, x = nn.Sequential(Mystery(), nn.Sequential(Mystery())), torch.randn(2, 4)
    with pytest.warns(UnknownOpWarning) as caught:
        graph = trace(model, (x,)).graph
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "autopar_tests.mystery.default, used 4 times, first in module '0'" in text
    assert "autopar/rules" in text
    unknown = [n for n in graph.nodes if not n.has_rule]
    assert [n.factors for n in unknown] == [()] * 4
    with pytest.raises(TraceError, match="mystery"):
        trace(model, (x,), strict=True)


def test_meta_and_real_models_give_the_same_graph() -> None:
    with torch.device("meta"):
        meta = llama()
    assert trace(meta, (), token_inputs()).graph == trace(llama(), (), token_inputs()).graph


@pytest.fixture
def one_rank() -> Any:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensor_parameters_are_traced_by_their_global_shape(one_rank: Any) -> None:
    model = gpt2()
    expected = trace(model, (), token_inputs()).graph
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        tensor = distribute_tensor(parameter.detach(), one_rank, [Replicate()])
        module.register_parameter(name.rpartition(".")[2], nn.Parameter(tensor))
    model.tie_weights()
    before = state_of(model)
    assert trace(model, (), token_inputs()).graph == expected
    assert state_of(model) == before
    assert all(isinstance(p, DTensor) for p in model.parameters())


class HoldsTensors(nn.Module):
    """Tensors that are no parameter and no buffer: one is an attribute, two are not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.attribute, self.inside = torch.arange(4.0), [torch.ones(4)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.attribute * self.inside[0]
        return (y + torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()


def test_tensors_that_are_attributes_are_state_and_others_constants() -> None:
    model, x = HoldsTensors(), torch.randn(2, 4)
    traced = trace(model, (x,))
    assert "buffer:attribute" in traced.inputs and "attribute" in vars(model)
    assert [n.role.value for n in traced.graph.nodes if n.op == "get_attr"] == ["constant"] * 2
    torch.testing.assert_close(run(traced, model, (x,), {})["loss:0"], model(x).detach())


_TRACE_7B = """
import resource, torch
from transformers import LlamaForCausalLM
from autopar.tracer import trace
from tests.tracer.execute import run
from tests.tracer.models import llama_config
torch.zeros(1) @ torch.zeros(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.device("meta"):
    config = llama_config(3, hidden_size=4096, head_dim=128, num_attention_heads=32,
        num_key_value_heads=32, intermediate_size=11008, vocab_size=32000)
    model = LlamaForCausalLM(config)
    ids = torch.zeros(16, 2048, dtype=torch.int64)
graph = trace(model, (), {"input_ids": ids, "labels": ids}).graph
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(len(graph.nodes), grown // 1024)
"""


@pytest.mark.nightly
def test_large_models_are_not_materialised() -> None:
    """Three layers of Llama-7B have 2.6 GB of float32 parameters, their logits alone 4 GB."""
    done = subprocess.run(
        [sys.executable, "-c", _TRACE_7B], cwd=ROOT, capture_output=True, text=True, check=True
    )
    num_nodes, grown_mib = map(int, done.stdout.split())
    assert num_nodes > 500
    assert grown_mib < 300


class Reversible(torch.autograd.Function):
    """Computes again in its backward what it is to differentiate, as Reformer's layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layer, ctx.x = layer, x.detach()
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            torch.autograd.backward(ctx.layer(x), grad)
        return x.grad, None


class Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Reversible.apply(self.first(x), self.second).square().mean()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_bar_of_progress_is_shown_while_a_model_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tqdm starts a thread with the first bar of a process; torch.fx shows bars too."""

    class Barred(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in tqdm(self, file=io.StringIO()):
                x = layer(x)
            return x.mean()

    monkeypatch.setattr(tqdm, "monitor", None)
    assert trace(Barred(nn.Linear(4, 4)), (torch.randn(2, 4),)).graph.nodes


def test_gradients_that_a_backward_adds_itself_are_not_lost_in_silence() -> None:
    """Those of `second` are returned by nothing."""
    before = torch.autograd.backward
    with pytest.raises(TraceError, match=r"calls torch\.autograd\.backward, as reversible layers"):
        trace(Reversed(), (torch.randn(2, 4),))
    assert torch.autograd.backward is before


class ListsWeights(nn.Module):
    """Reads a weight where the state of modules is not looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weights = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) @ self.weights[0]).sum()


def test_a_parameter_in_a_list_is_the_modules() -> None:
    traced = trace(ListsWeights(), (torch.randn(2, 4),))
    (weight,) = (n for n in traced.graph.nodes if n.target == "linear.weight" and n.op != "output")
    assert sum(Ref(weight.index) in n.inputs for n in traced.graph.nodes) > 1


UNHASHABLE = Annotated[torch.Tensor, []]
"""Callable, of a type that has a hash, and its hash raises."""


def test_a_module_is_traced_whose_file_has_what_cannot_be_hashed(one_rank: Any) -> None:
    class Doubled(nn.Module):
        def forward(self, x: UNHASHABLE) -> torch.Tensor:
            return 2 * x

    assert trace(nn.Sequential(Doubled(), nn.Linear(4, 4)), (torch.ones(2, 4),), {}).graph.nodes

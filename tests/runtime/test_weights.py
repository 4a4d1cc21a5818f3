"""Checkpoints and initialisation of models on the meta device, in one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

import autopar
from autopar.errors import WeightsError
from autopar.runtime.checkpoint import lazy
from autopar.runtime.checkpoint.initialise import Initialiser
from autopar.runtime.checkpoint.weights import find_sources

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 96,
}  # fmt: skip


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SMALL))


def tied_gpt2() -> nn.Module:
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=96, n_positions=16,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SMALL))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SMALL))


def resnet() -> nn.Module:
    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1])
    return ResNetForImageClassification(config)


class Net(nn.Module):
    """Two layers around a table that `__init__` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.register_buffer("table", torch.arange(8.0) + 1, persistent=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.table)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def same_state(a: nn.Module, b: nn.Module) -> bool:
    ours = {**a.state_dict(), **dict(a.named_buffers())}
    theirs = {**b.state_dict(), **dict(b.named_buffers())}
    assert list(ours) == list(theirs)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("make", [llama, tied_gpt2, mixtral, bert, resnet])
def test_what_save_pretrained_writes_is_read_into_a_model_on_meta(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    saved: Any = make()
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = autopar.compile(on_meta(make), weights=tmp_path, cluster="1xcpu")
    assert same_state(model, saved)


def test_a_checkpoint_of_the_model_inside_lacks_a_prefix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved: Any = tied_gpt2()
    saved.transformer.save_pretrained(tmp_path)
    model = autopar.compile(on_meta(tied_gpt2), weights=tmp_path, cluster="1xcpu")
    assert same_state(model, saved)


def test_a_module_of_ones_own_keeps_its_buffers_and_its_optimizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = Net()
    file = tmp_path / "net.safetensors"
    save_file({n: x.to(torch.float64) for n, x in saved.state_dict().items()}, file)
    with autopar.on_meta():
        net = Net()
    assert net.up.weight.is_meta and not net.table.is_meta
    param = net.up.weight
    model = autopar.compile(net, weights=file, cluster="1xcpu")
    assert model.up.weight is param and param.dtype == torch.float32
    assert same_state(model, saved)
    x = torch.randn(4, 6)
    torch.testing.assert_close(model(x), saved(x))


def test_parameters_tied_by_hand_stay_tied_on_meta() -> None:
    shared = nn.Parameter(torch.ones(2, 2))
    with autopar.on_meta():
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[0].weight = shared
        model[1].weight = shared
    assert model[0].weight is model[1].weight and model[0].weight.is_meta
    assert nn.Linear(2, 2).weight.is_meta is False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("up.bias"), "it lacks up.bias"),
        (lambda state: state.update(other=torch.ones(1)), "only it has other"),
        (lambda state: state.update({"up.bias": torch.ones(3)}), r"up.bias \[3\] where the model"),
        (lambda state: state.update({"up.bias": torch.ones(8).int()}), "dtypes differ: up.bias"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    change: Callable[[dict[str, Tensor]], object], words: str, tmp_path: Path
) -> None:
    net = Net()
    before = copy.deepcopy(net)
    state = dict(net.state_dict())
    change(state)
    save_file(state, tmp_path / "net.safetensors")
    with pytest.raises(WeightsError, match=words):
        autopar.compile(net, weights=tmp_path, cluster="1xcpu")
    assert same_state(net, before)


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    net = Net()
    with pytest.raises(WeightsError, match="there is no file or directory"):
        find_sources(net, tmp_path / "absent", None)
    with pytest.raises(WeightsError, match="there is no safetensors file in"):
        find_sources(net, tmp_path, None)
    damaged = tmp_path / "a.safetensors"
    damaged.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not a header")
    with pytest.raises(WeightsError, match=r"cannot read .*a\.safetensors"):
        find_sources(net, tmp_path, None)
    save_file(dict(net.state_dict()), damaged)
    index = {"weight_map": dict.fromkeys([*net.state_dict(), "more"], damaged.name)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"speaks of more, which its file does not have"):
        find_sources(net, tmp_path, None)


def test_no_more_is_read_than_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stores a quarter of a tensor reads a quarter: of a stack of experts as well."""
    torch.manual_seed(0)
    saved: Any = mixtral()
    saved.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    value = saved.get_parameter(name)
    sources = find_sources(on_meta(mixtral), tmp_path, None)
    read: list[int] = []

    def counted(self: lazy.Stored, place: lazy.Region) -> Tensor:
        found = original(self, place)
        read.append(found.numel())
        return found

    original = lazy.Stored.read
    monkeypatch.setattr(lazy.Stored, "read", counted)
    for place in [
        (slice(1, 2), slice(0, 128), slice(0, 32)),
        (slice(0, 4), slice(48, 80), slice(0, 32)),
        (slice(0, 4), slice(0, 128), slice(8, 16)),
        (slice(4, 4), slice(0, 128), slice(0, 32)),
    ]:
        read.clear()
        piece = sources.read(name, place)
        assert torch.equal(piece, value[place])
        assert sum(read) == piece.numel()
        assert piece.untyped_storage().nbytes() == piece.nbytes


def test_a_stored_tensor_is_sliced_in_the_file(tmp_path: Path) -> None:
    """What is read is a slice, never `get_tensor` of more than a scalar."""
    save_file({"a": torch.arange(24.0).reshape(6, 4)}, tmp_path / "a.safetensors")
    stored = lazy.open_checkpoint(tmp_path)["a"]

    class OnlySlices:
        def get_slice(self, name: str) -> Any:
            return stored.file.get_slice(name)

    piece = lazy.Stored(OnlySlices(), "a", stored.shape, stored.dtype).read(
        (slice(2, 4), slice(1, 3))
    )
    assert piece.tolist() == [[9.0, 10.0], [13.0, 14.0]]
    assert piece.untyped_storage().nbytes() == 16


DRAWS = 50
"""How often a tensor of few elements is made: of few numbers one sees no distribution."""


@pytest.mark.parametrize("make", [llama, tied_gpt2, mixtral, bert, resnet])
def test_a_seed_gives_the_distributions_of_eager(make: Callable[[], nn.Module]) -> None:
    """Means and spreads of eager's numbers and ours are apart by no more than five of their own
    standard deviations: of n numbers each, spreads by 1 / sqrt(n) of them, means by sqrt(2 / n)."""
    torch.manual_seed(0)
    models = [make()]
    few = {n for n, p in models[0].named_parameters() if p.numel() < 500 and p.detach().std() > 0}
    models += [make() for _ in range(DRAWS - 1) if few]
    inits = [Initialiser(on_meta(make), seed) for seed in range(len(models))]
    for name, _ in models[0].named_parameters():
        draws = DRAWS if name in few else 1
        eager = torch.cat([model.get_parameter(name).detach().ravel() for model in models[:draws]])
        value = torch.cat([init.whole(name).ravel() for init in inits[:draws]])
        spread, n = float(eager.std(correction=0)), eager.numel()
        assert float(value.std(correction=0)) == pytest.approx(spread, rel=5 / n**0.5), name
        assert abs(float(value.mean() - eager.mean())) <= spread * 5 * (2 / n) ** 0.5, name
    for name, buffer in models[0].named_buffers():
        assert torch.equal(inits[0].whole(name), buffer), name


def test_a_seed_decides_by_name_alone() -> None:
    short = Initialiser(on_meta(lambda: nn.Sequential(nn.Linear(4, 4))), 3)
    long = Initialiser(on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), 3)
    other = Initialiser(on_meta(lambda: nn.Sequential(nn.Linear(4, 4))), 4)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert torch.equal(short.whole("0.weight"), long.whole("0.weight"))
    assert torch.equal(
        short.whole("0.weight")[1:3], short.read("0.weight", (slice(1, 3), slice(0, 4)))
    )
    assert not torch.equal(long.whole("0.weight"), long.whole("1.weight"))
    assert not torch.equal(short.whole("0.weight"), other.whole("0.weight"))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_looks_at_neighbours_gets_them() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))

        def reset_parameters(self) -> None:
            nn.init.uniform_(self.a)
            nn.init.constant_(self.b, self.a.sum().item())

    init = Initialiser(on_meta(Sums), 0)
    assert init.whole("b").unique().numel() == 1
    assert 0.0 < float(init.whole("b")[0]) < 3.0


def test_what_nothing_initialises_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("steps", torch.arange(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    for name in ("scale", "steps"):
        with pytest.raises(WeightsError, match=f"{name} is on the meta device, and nothing init"):
            Initialiser(on_meta(Bare), 0).whole(name)
    with autopar.on_meta():
        bare = Bare()
    assert bare.steps.tolist() == [0, 1, 2]
    with pytest.raises(WeightsError, match="scale is on the meta device"):
        autopar.compile(bare, seed=0, cluster="1xcpu")

"""The private torch APIs that the training process relies on, in the torch that is installed."""

from __future__ import annotations

import inspect
import operator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import clip_grad

from autopar.codegen.torch_private import boxed_codegen
from autopar.errors import AutoparError
from autopar.runtime import dtensor_private, torch_private
from autopar.runtime.program import backend


def test_the_port_of_a_store_that_a_process_keeps() -> None:
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert torch_private.port_of(dist.PrefixStore("a", dist.PrefixStore("b", kept))) == kept.port


def test_what_modules_load_is_handed_on() -> None:
    model = nn.Linear(2, 2)
    model.register_load_state_dict_pre_hook(
        lambda _, state, prefix, *__: state.update({f"{prefix}weight": 1})
    )
    seen: list[dict[str, Any]] = []

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
        torch_private.run_load_hooks(module, state, prefix, *more)
        seen.append(dict(state))

    plain = nn.Module._load_from_state_dict
    with torch_private.loading_by(take):
        torch_private.load_into(model, {"bias": 2}, "")
    assert seen == [{"bias": 2, "weight": 1}]
    assert nn.Module._load_from_state_dict is plain


def test_a_functional_collective_is_done_by_another() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        seen: list[Any] = []

        def made(plain: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.append(x)
            return plain(x, *rest)

        torch_private.take_over_collective("all_gather_into_tensor_coalesced", "CPU", made)
        c10d = torch.ops._c10d_functional
        x = torch.ones(3)
        (got,) = c10d.all_gather_into_tensor_coalesced([x], 1, group.group_name)
        assert torch.equal(c10d.wait_tensor(got), x) and seen[0][0] is x
    finally:
        dist.destroy_process_group()


def test_groups_wait_as_long_as_that_of_the_world() -> None:
    store = dist.HashStore()
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    try:
        assert torch_private.timeout_of_world() == timedelta(seconds=77)
        other = dist.new_group(backend="gloo")
        assert isinstance(other, dist.ProcessGroup)
        for group in (torch_private.gloo_of_world(), other):
            torch_private.limit_waiting(group)
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=77)
            before = torch_private.collectives_begun()
            dist.barrier()
            dist.all_reduce(torch.ones(1), group=group)
            assert torch_private.collectives_begun() == before + 2
        torch_private.store_of_its_own().set("k", "v")
        assert torch_private.port_of(torch_private.default_store()) is None
        assert torch_private.default_store().get("k") == b"v"
        assert isinstance(torch_private.default_store(), dist.Store) and store.num_keys() > 0
    finally:
        dist.destroy_process_group()


def test_a_dtensor_like_another() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        like = distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)])
        local = torch.randn(4, 6)
        made = dtensor_private.dtensor_like(local, like)
        assert made.placements == like.placements and made.shape == like.shape
        assert made.device_mesh == like.device_mesh and made.stride() == like.stride()
        torch.testing.assert_close(made.full_tensor(), local, rtol=0, atol=0)
        assert not made.requires_grad
        piece = dtensor_private.shard_of(torch.nn.Parameter(made))
        assert piece.data_ptr() == local.data_ptr() and not piece.requires_grad
    finally:
        dist.destroy_process_group()


def test_hooks_of_a_parameter_are_handed_on() -> None:
    old, new = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    seen: list[torch.Tensor] = []
    handle = old.register_hook(lambda grad: grad * 3)
    old.register_post_accumulate_grad_hook(seen.append)
    torch_private.hand_hooks(old, new)
    new.sum().backward()
    assert new.grad is not None and new.grad.tolist() == [3, 3]
    assert len(seen) == 1 and seen[0] is new
    handle.remove()
    new.sum().backward()
    assert new.grad.tolist() == [4, 4]


def test_a_dispatch_mode_sees_the_ops_that_autograd_calls() -> None:
    class Seen(torch_private.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return torch_private.tree_map(lambda x: x, func(*args, **(kwargs or {})))

    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with Seen():
        x.sin().sum().backward()
    assert {"aten.sin.default", "aten.cos.default"} <= set(seen)


def test_trees() -> None:
    tree = {"a": (1, [2, None]), "b": torch.ones(1)}
    leaves, spec = torch_private.flatten(tree)
    assert leaves[:3] == [1, 2, None]
    assert torch_private.unflatten(leaves, spec) == tree
    assert torch_private.flatten({"a": (1, [2, None]), "b": 3})[1] == spec
    assert torch_private.flatten({"a": (1, [2]), "b": 3})[1] != spec


@pytest.mark.parametrize("retain", [False, True])
def test_whether_the_graph_is_kept_is_known_in_backward(retain: bool) -> None:
    seen: list[bool] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(torch_private.keeps_graph())
            return grad

    Watch.apply(torch.ones((), requires_grad=True)).backward(retain_graph=retain)
    assert seen == [retain]


def test_the_signatures_relied_on() -> None:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    assert config.allow_buffer_reuse and config.inplace_buffers
    assert config.reorder_for_locality and config.reorder_for_peak_memory
    assert list(inspect.signature(compile_fx).parameters)[:2] == ["model_", "example_inputs_"]
    assert (
        "src_data_rank" in inspect.signature(torch.distributed.tensor.distribute_tensor).parameters
    )


def tanh_of_product() -> fx.GraphModule:
    """tanh(x w) and x, as a boxed graph."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(torch.ops.aten.mm.default, (x, w))
    graph.output((graph.call_function(torch.ops.aten.tanh.default, (product,)), x))
    graph.set_codegen(boxed_codegen())
    return fx.GraphModule(torch.nn.Module(), graph)


def test_inductor_runs_a_boxed_graph() -> None:
    graph = backend.prepare(tanh_of_product(), "inductor")
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(3, 4, generator=generator)
        w = torch.randn(4, 5, generator=generator)
        boxed = [x, w]
        y, same = graph(boxed)
        assert boxed == []
        torch.testing.assert_close(y, torch.tanh(x @ w))
        assert torch.equal(same, x)


def test_under_inductor_a_seed_draws_what_it_draws_in_eager() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    drawn = graph.call_function(torch.ops.aten.native_dropout.default, (x, 0.5, True))
    mask = graph.call_function(operator.getitem, (drawn, 1))
    noise = graph.call_function(torch.ops.aten.rand_like.default, (x,))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (mask, noise)),))
    graph.set_codegen(boxed_codegen())
    gm = fx.GraphModule(torch.nn.Module(), graph)
    torch.manual_seed(1)
    (expected,) = gm([torch.ones(8, 8)])
    compiled = backend.prepare(gm, "inductor")
    torch.manual_seed(1)
    (found,) = compiled([torch.ones(8, 8)])
    assert torch.equal(found, expected)


class OpLog(torch_private.TorchDispatchMode):
    """The names of products and copies, in the order in which they are begun."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "reload", "arrived", "offload", "landed"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def copied_beside_products() -> fx.GraphModule:
    """Weights that come from the host two products ahead, products recomputed just before they are
    read, and what is made on its way to the host for two products."""
    graph, ops = fx.Graph(), torch.ops.autopar
    x, *homes = (graph.placeholder(name) for name in "xabcd")
    coming = [graph.call_function(ops.reload.default, (h, torch.device("cpu"))) for h in homes[:2]]
    made, leaving = [x], []
    for k in range(len(homes)):
        graph.call_function(ops.arrived.default, (coming[k],))
        product = graph.call_function(torch.ops.aten.mm.default, (made[-1], coming[k]))
        made.append(graph.call_function(torch.ops.aten.tanh.default, (product,)))
        if k + 2 < len(homes):
            again = graph.call_function(ops.reload.default, (homes[k + 2], torch.device("cpu")))
            coming.append(again)
        if k >= 2:
            graph.call_function(ops.landed.default, (leaving[k - 2],))
        leaving.append(graph.call_function(ops.offload.default, (made[-1],)))
    for k in (2, 1):
        weights = graph.call_function(ops.reload.default, (homes[k], torch.device("cpu")))
        graph.call_function(ops.arrived.default, (weights,))
        again = graph.call_function(torch.ops.aten.mm.default, (made[k], weights))
        made.append(graph.call_function(torch.ops.aten.mm.default, (made[-1], again)))
    graph.output((made[-1], *leaving))
    graph.set_codegen(boxed_codegen())
    return fx.GraphModule(torch.nn.Module(), graph)


def test_under_inductor_ops_keep_the_order_of_the_schedule() -> None:
    gm = copied_beside_products()
    logs: list[list[str]] = []
    for graph in (gm, backend.prepare(gm, "inductor")):
        for _ in range(2):
            generator = torch.Generator().manual_seed(0)
            given = [torch.rand(16, 16, generator=generator) for _ in range(5)]
            with OpLog() as log:
                graph(given)
        logs.append(log.names)
    expected, found = logs
    assert expected.count("reload") == 6
    assert expected[:4] == ["reload", "reload", "arrived", "mm"]
    assert found == expected


def test_an_inductor_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("no compiler")

    monkeypatch.setattr(backend, "inductor", broken)
    graph = backend.prepare(tanh_of_product(), "inductor")
    with pytest.raises(AutoparError, match=r"'inductor' failed \(ValueError: no compiler\).*eager"):
        graph([torch.ones(3, 4), torch.ones(4, 5)])


def test_backends_by_device() -> None:
    assert backend.choose(None, torch.device("cpu")) == "eager"
    assert backend.choose(None, torch.device("cuda", 0)) == "inductor"
    assert backend.choose("eager", torch.device("cuda", 0)) == "eager"
    with pytest.raises(AutoparError, match="no backend 'jit': choose one of eager, inductor"):
        backend.choose("jit", torch.device("cpu"))


def test_what_torch_compile_made_leads_to_the_plain_module() -> None:
    plain = torch.nn.Linear(2, 2)
    made: Any = torch.compile(plain)
    assert (
        torch_private.without_dynamo(made) is plain and torch_private.without_dynamo(plain) is plain
    )


def test_autograd_records_again_inside_the_kernel_of_an_op() -> None:
    @torch.library.custom_op("autopar_tests::slope", mutates_args=(), schema="(Tensor x) -> Tensor")
    def slope(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with torch_private.differentiating():
            (found,) = torch.autograd.grad((x * x).sum(), x)
        assert not (x * x).requires_grad
        return found

    assert slope(torch.tensor([3.0])).tolist() == [6.0]


def test_what_dtensors_of_some_ranks_rely_on() -> None:
    """What is taken over in torch is there, with the arguments it is called with."""
    module: Any = clip_grad
    norm = list(inspect.signature(module._get_total_norm).parameters)
    assert norm == ["tensors", "norm_type", "error_if_nonfinite", "foreach"]
    given = list(inspect.signature(DTensor.redistribute).parameters)
    assert given[:3] == ["self", "device_mesh", "placements"]
    assert "redistribute(" in inspect.getsource(DTensor.full_tensor)
    assert "_init_backend" in inspect.signature(DeviceMesh.__init__).parameters
    names = {*torch._C._dispatch_get_all_op_names()}
    of_lists = {"aten::_foreach_mul_.Scalar", "aten::_fused_adamw_"}
    assert names > {*of_lists, "aten::_local_scalar_dense"}
    process = _async_process_executor._AsyncCheckpointProcess
    assert "self._process_pipe.send(data)" in inspect.getsource(process._send)
    assert "self._send(async_cp_request)" in inspect.getsource(process.save)


def test_ops_on_dtensors_are_taken_over_and_done_as_torch_does() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)])
        seen: list[int] = []

        negated = torch.ops.aten._foreach_neg.default

        def counted(plain: Any, op: Any, args: Any, kwargs: Any) -> Any:
            assert op is negated
            seen.append(len(args[0]))
            return plain(*args, **kwargs)

        dtensor_private.take_over_ops(lambda op: counted if op is negated else None, set())
        for _ in range(2):
            made: Any = torch._foreach_neg([x])
            assert made[0].full_tensor().tolist() == [0, -1, -2, -3]
        assert seen == [1, 1]
    finally:
        dist.destroy_process_group()


def test_assigned_data_and_gradients_are_the_pieces_that_are_said() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, other = (distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]) for _ in range(2))
        dtensor_private.take_over_assignments(lambda at, value: value + 1 if at is x else None)
        x.data = torch.zeros(4)
        assert (x * 2).full_tensor().tolist() == [2] * 4
        x.grad = torch.ones(4)
        assert x.grad is not None and x.grad.full_tensor().tolist() == [2] * 4
        x.grad = gradient = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        assert x.grad is gradient
        del x.grad
        assert x.grad is None
        other.data = other.data
        assert other.full_tensor().tolist() == [0, 1, 2, 3]
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_classes_with_ops_of_their_own() -> None:
    class Named(Tensor):
        pass

    plain = torch.ones(2)
    own = [
        plain,
        nn.Parameter(plain),
        plain.as_subclass(Named),
        FakeTensorMode().from_tensor(plain),
    ]
    assert not any(map(torch_private.has_own_ops, own))
    assert torch_private.has_own_ops(torch.masked.masked_tensor(plain, plain > 0))


def test_paths_print_as_they_are_written() -> None:
    found = torch_private.flatten_with_paths(((1, {"a": [2]}), {"k": 3}))
    assert [("".join(map(str, path[1:])), leaf) for path, leaf in found] == [
        ("[0]", 1), ("[1]['a'][0]", 2), ("['k']", 3),
    ]  # fmt: skip
    assert found[1][0][1].idx == 1 and found[2][0][1].key == "k"

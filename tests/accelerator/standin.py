"""The device of `device.cpp`: how its library is built, and how a process comes to have it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from datetime import timedelta
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from autopar.runtime.process import stage_groups, world
from autopar.runtime.torch_private import backend_of_two

NAME = "standin"
LIBRARY = "standin_device"


def build(folder: Path) -> Path:
    """The library, in `folder`: twenty seconds."""
    target = folder / f"{LIBRARY}.so"
    source = Path(__file__).with_name("device.cpp")
    included = [*cpp_extension.include_paths("cpu"), sysconfig.get_path("include")]
    linked = [f"-L{path}" for path in cpp_extension.library_paths("cpu")]
    subprocess.run(
        [
            *("g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC"),
            f"-DTORCH_EXTENSION_NAME={LIBRARY}",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{path}" for path in included),
            *(str(source), "-o", str(target)),
            *linked,
            *("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
        ],
        check=True,
    )
    return target


def register(library: Path) -> None:
    """Let this process have the device, with collectives by gloo, and autopar use it where a model
    lies on it. A process cannot be without it again."""
    loader = ExtensionFileLoader(LIBRARY, str(library))
    spec = spec_from_loader(LIBRARY, loader)
    assert spec is not None
    native = module_from_spec(spec)
    loader.exec_module(native)
    torch.utils.rename_privateuse1_backend(NAME)
    module = _Module(f"torch.{NAME}")
    setattr(torch, NAME, module)
    sys.modules[module.__name__] = module
    torch.utils.generate_methods_for_privateuse1_backend()

    def collectives(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return native.Collectives(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(NAME, collectives, devices=[NAME])
    _use_in_autopar(native)


def _use_in_autopar(native: Any) -> None:
    def between(store: Any, place: int, _device: torch.device) -> Any:
        return native.Collectives(backend_of_two(store, place, torch.device("cpu")))

    for target, name, value in (
        (world, "_device", lambda *_: torch.device(NAME, 0)),
        (stage_groups, "backend_of_two", between),
        (torch.cuda, "Event", _Done),
    ):
        patch.object(target, name, value).start()


class _Done:
    """An event, or a stream, of a device that does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _other: Any) -> None: ...


class _Module(ModuleType):
    """What `torch.cuda` is for CUDA."""

    device = stream = Stream = _Done

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, _device: Any) -> None: ...

    def manual_seed_all(self, _seed: int) -> None: ...

    manual_seed = set_device

    def synchronize(self, _device: Any = None) -> None: ...

    def current_stream(self, _device: Any = None) -> _Done:
        return _Done()

    def get_rng_state(self, _device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, _device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

"""A device "gpu" that computes on the CPU: finds tensors on the wrong device, and each wait for the device.

PyTorch lets a process have one device of its own (PrivateUse1), and keeps it: a test with this one runs in a process
of its own. Its tensors hold real numbers, so that what depends on them, such as a loss, is as on a CPU.
"""

import collections
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


_setup_privateuseone_for_python_backend("gpu")
GPU = torch.device("gpu:0")
aten = torch.ops.aten

# Operators that give the CPU a number, or tensors whose shape follows from numbers.
WAITING = {
    aten._local_scalar_dense.default,  # `item`, `int`, `float` and `bool` of a tensor
    aten._unique.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
}
COPY = aten.copy_.default
TO = aten._to_copy.default
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class WrongDevice(Exception):
    """An operator got tensors of both devices. As on a GPU, a tensor with the shape () may be on the CPU."""


class OnGpu(torch.Tensor):
    """A tensor on the GPU; its numbers are in `on_cpu`."""

    @staticmethod
    def __new__(cls, on_cpu):
        layout = {"strides": on_cpu.stride(), "storage_offset": on_cpu.storage_offset(), "dtype": on_cpu.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, on_cpu.shape, device=GPU, **layout)

    def __init__(self, on_cpu):
        self.on_cpu = on_cpu

    def tolist(self):  # PyTorch's reads memory, and refuses tensors of other classes
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} on a GPU outside of `a_gpu`")


class Gpu(TorchDispatchMode):
    """
    Attributes:
        waits: how often each function of the package has waited for the device: `learner.py:update`.
    """

    def __init__(self):
        super().__init__()
        self.waits = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled():  # there, operators that are made of others come here, too
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        on_gpu = [tensor for tensor in given if isinstance(tensor, OnGpu)]
        gives_gpu = bool(on_gpu)
        if kwargs.get("device") is not None:
            gives_gpu = torch.device(kwargs["device"]).type == GPU.type
        if function is COPY:
            gives_gpu = isinstance(args[0], OnGpu)
        elif on_gpu and function is not TO:
            strangers = [tensor for tensor in given if not isinstance(tensor, OnGpu) and tensor.dim()]
            if strangers:
                raise WrongDevice(f"{function} in {function_of_package()}: {len(strangers)} tensors are on the CPU")
        if on_gpu or gives_gpu:
            self.waits[function_of_package()] += waits(function, args, kwargs, gives_gpu)
        wrapper_of = {id(tensor.on_cpu): tensor for tensor in on_gpu}
        args, kwargs = tree_map_only(OnGpu, lambda tensor: tensor.on_cpu, (args, kwargs))
        if gives_gpu and kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if not gives_gpu:
            return result

        def on_the_gpu(tensor):
            known = wrapper_of.get(id(tensor))  # of a tensor that is changed in place
            return OnGpu(tensor) if known is None else known

        return tree_map_only(torch.Tensor, on_the_gpu, result)


def waits(function, args, kwargs, gives_gpu) -> bool:
    """Whether the CPU waits for the device in an operator on the GPU."""
    if function in WAITING:
        return True
    if function in INDEXING:  # by a mask
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if function not in (TO, COPY):
        return False
    source = args[1] if function is COPY else args[0]
    is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking")
    from_gpu = isinstance(source, OnGpu)
    return from_gpu != gives_gpu and (from_gpu or not is_async)


def function_of_package() -> str:
    """The function of the package that called the running operator; of a test, if the package did not."""
    frame = sys._getframe(1)
    while frame:
        path = Path(frame.f_code.co_filename)
        if {"training", "modeling", "inference"} & {*path.parts} and "site-packages" not in path.parts:
            return f"{path.name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "a test"


@contextlib.contextmanager
def a_gpu() -> Iterator[Gpu]:
    """In this block, tensors can be on "gpu", in this thread."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # `module.to` keeps its parameters, as for a GPU
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(x, device="gpu")` makes x on the CPU, and copies it
    try:
        with torch.autograd.set_multithreading_enabled(False), Gpu() as gpu:
            yield gpu
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_swap_module_params_on_conversion(swaps)

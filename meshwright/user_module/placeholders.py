"""What a tensor without values may be asked for, and what somebody wanted of it who asked for more."""

from __future__ import annotations

from typing import Any

import torch

_GETTERS = (
    "shape ndim dtype device layout itemsize nbytes is_leaf is_meta is_cpu is_cuda is_sparse is_quantized is_nested "
    "is_mkldnn is_mps is_xpu is_xla is_sparse_csr _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex is_signed "
    "get_device __len__ __hash__"
)


def _known(names: str, of: Any = torch.Tensor) -> list[Any]:
    return [getattr(of, name) for name in names.split() if hasattr(of, name)]


GET_FLAG = torch.Tensor.requires_grad.__get__  # pyright: ignore[reportAttributeAccessIssue]
METADATA = frozenset(
    [
        *(getter.__get__ for getter in _known(_GETTERS)),
        GET_FLAG,
        *_known(_METHODS),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
)
FLAG = (torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_)  # pyright: ignore[reportAttributeAccessIssue]
SHOWN = (torch.Tensor.__repr__, torch.Tensor.__format__)
_GRAD = (torch.Tensor.grad.__get__, torch.Tensor.grad.__set__)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
READ, WRITE, GRADIENT, TIE = "read", "write", "gradient", "tie"
_IN_PLACE = frozenset(
    f"__{name}__"
    for name in "setitem iadd isub imul itruediv idiv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift".split()
)


def wanted(func: Any) -> tuple[str, str]:
    """The name of a function of torch that was called on a tensor, and what for: `READ`, `WRITE`, …."""
    called = getattr(func, "__name__", str(func))
    called = getattr(getattr(func, "__self__", None), "__name__", called) if "__" in called else called
    if func in _GRAD or called in ("grad", "retain_grad") or "hook" in called:
        return called, GRADIENT
    if called == "grad_fn":  # which a module looks at where a parameter is assigned to it
        return called, TIE
    sets = func == torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
    writes = called in _IN_PLACE or (called.endswith("_") and not called.endswith("__"))
    return called, WRITE if sets or writes else READ


def first(kinds: tuple[type, ...], *nest: Any) -> Any:
    """The first tensor of some classes among the arguments of a call."""
    for value in nest:
        if type(value) in kinds:
            return value
        inner = (
            value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
        )
        found = first(kinds, *inner)
        if found is not None:
            return found
    return None


__all__ = ["FLAG", "GET_FLAG", "GRADIENT", "METADATA", "READ", "SHOWN", "TIE", "WRITE", "first", "wanted"]

"""Operators that are others under a second name, with the same arguments: ``torch.concatenate`` is ``torch.cat``.

They get the first name before anything else is done with them, so one form, one rule and one price do for both.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.graph import Graph, of_aten


def _same(names: str) -> dict[str, str]:
    """Return the table of lines ``second=first``, each with an overload (`default` if none is given)."""
    both = of_aten(names.replace("=", " "))
    return dict(zip(both[::2], both[1::2], strict=True))


def _overloads(names: str, overloads: str) -> dict[str, str]:
    """Return a table in which each of these overloads has both names."""
    return {
        f"aten.{second}.{overload}": f"aten.{first}.{overload}"
        for second, first in (pair.split("=") for pair in names.split())
        for overload in overloads.split()
    }


ALIASES: dict[str, str] = {
    # ---- pointwise
    **_same("absolute=abs negative=neg fix=trunc arccos=acos arccosh=acosh arcsin=asin arcsinh=asinh arctan=atan "
            "arctanh=atanh arctan2=atan2 special_expit=sigmoid special_exp2=exp2 special_expm1=expm1 special_erf=erf "
            "special_erfc=erfc special_erfinv=erfinv special_digamma=digamma special_psi=digamma "
            "special_gammaln=lgamma special_log1p=log1p special_sinc=sinc special_logit=logit special_i0=i0 "
            "special_polygamma=polygamma special_multigammaln=mvlgamma special_gammainc=igamma "
            "special_gammaincc=igammac special_xlogy=xlogy.Tensor special_xlogy.other_scalar=xlogy.Scalar_Other "
            "special_xlogy.self_scalar=xlogy.Scalar_Self"),
    **_same("clip=clamp clip.Tensor=clamp.Tensor"),
    **_overloads("subtract=sub multiply=mul divide=div true_divide=div greater=gt greater_equal=ge less=lt "
                 "less_equal=le not_equal=ne __xor__=bitwise_xor", "Tensor Scalar"),
    **_overloads("divide=div", "Tensor_mode Scalar_mode"),
    # ---- joins and products
    **_same("concatenate=cat concat=cat row_stack=vstack ger=outer linalg_matmul=matmul chain_matmul=linalg_multi_dot"),
    # ---- along dims
    **_same("special_softmax=softmax.int special_log_softmax=log_softmax.int special_logsumexp=logsumexp"),
    # ---- matrices
    **_same("inverse=linalg_inv det=linalg_det slogdet=linalg_slogdet matrix_power=linalg_matrix_power "
            "matrix_exp=linalg_matrix_exp"),
}  # fmt: skip


def first_names(graph: Graph) -> Graph:
    """Return the graph with each operator by its first name."""
    if not any(node.op in ALIASES for node in graph.nodes):
        return graph
    return replace(
        graph,
        nodes=tuple(
            replace(node, op=ALIASES[node.op]) if node.op in ALIASES else node for node in graph.nodes
        ),
    )


__all__ = ["ALIASES", "first_names"]

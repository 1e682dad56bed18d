"""Rules of operators that depend on dims, sizes, groups or constants among the arguments.

Each function takes a node and the types of its graph and returns the bound rule, usually by writing the line for these
shapes. There is one table for each kind of operator; `SPECIAL` joins them.
"""

from meshwright.ops.special.attention import ATTENTION
from meshwright.ops.special.build import Special
from meshwright.ops.special.experts import EXPERTS
from meshwright.ops.special.index import INDEX
from meshwright.ops.special.loss import LOSS
from meshwright.ops.special.matrices import MATRICES
from meshwright.ops.special.norm import NORM
from meshwright.ops.special.pointwise import POINTWISE
from meshwright.ops.special.products import PRODUCTS
from meshwright.ops.special.recurrent import RECURRENT
from meshwright.ops.special.reduce import REDUCE
from meshwright.ops.special.shape import SHAPE

SPECIAL: dict[str, Special] = {
    **SHAPE,
    **POINTWISE,
    **PRODUCTS,
    **MATRICES,
    **REDUCE,
    **NORM,
    **ATTENTION,
    **INDEX,
    **EXPERTS,
    **RECURRENT,
    **LOSS,
}

__all__ = ["SPECIAL", "Special"]

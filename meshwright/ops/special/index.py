"""Reading and writing at computed indices: the indexed dim stays unsharded, the dims of the indices may be sharded."""

from __future__ import annotations

from meshwright.core.graph import ROWS_MARK, Node, Ref
from meshwright.errors import StrategyError
from meshwright.ops.rule import Rule, RuleDim
from meshwright.ops.special.build import Special, Types, broadcast, letters, line, make, replicated, shapes_in


def _shared(
    shape: tuple[int, ...], others: list[tuple[int, ...]], dim: int
) -> tuple[list[str], dict[str, int], set[str]]:
    """Return names, sizes and unsharded letters of a tensor that is indexed along `dim` by tensors of equal rank."""
    names = letters(len(shape))
    sizes = dict(zip(names, shape, strict=True))
    held = {names[dim]} if names else set[str]()
    held |= {n for i, n in enumerate(names) if i != dim and any(o[i] != shape[i] for o in others)}
    return names, sizes, held


def _inner(
    names: list[str], shape: tuple[int, ...], dim: int, held: set[str], sizes: dict[str, int]
) -> list[RuleDim]:
    """Return the dims of an index: shared letters, ``j`` along `dim`, and separate letters where it is smaller."""
    port: list[RuleDim] = []
    for i, n in enumerate(shape):
        name = "j" if i == dim else f"j{i}" if names[i] in held else names[i]
        sizes[name] = n
        port.append((name,))
    return port


def gather(node: Node, types: Types) -> Rule:
    """``a s! c, @a j c -> a j c``."""
    source, index = shapes_in(node, types)
    if not source or not index:
        return replicated(node, types, "it reads a single element")
    dim = int(node.args[1]) % len(source)
    names, sizes, held = _shared(source, [index], dim)
    port = _inner(names, index, dim, held, sizes)
    fixed = held | {d[0] for i, d in enumerate(port) if i != dim and names[i] in held}
    return make([[(n,) for n in names], port], [port], sizes, unsharded=fixed, terms=[(0,)])


def scatter(node: Node, types: Types) -> Rule:
    """``a s! c, @a j! c (+ a j! c) -> a s! c``; where values are added, ``j`` may be sharded."""
    shapes = shapes_in(node, types)
    source, index = shapes[:2]
    if not source or not index:
        return replicated(node, types, "it writes a single element")
    dim = int(node.args[1]) % len(source)
    names, sizes, held = _shared(source, list(shapes[1:]), dim)
    port = _inner(names, index, dim, held, sizes)
    held |= {d[0] for i, d in enumerate(port) if i != dim and names[i] in held}
    ports: list[list[RuleDim]] = [[(n,) for n in names], port]
    added = node.op == "aten.scatter_add.default"
    terms: list[tuple[int, ...]] = []
    if len(shapes) == 3:
        # A source may be larger than its index; then only its first elements are read.
        own: list[RuleDim] = []
        for i, n in enumerate(shapes[2]):
            same = n == index[i]
            name = port[i][0] if same else f"s{i}"
            sizes[name] = n
            held |= set() if same else {name, port[i][0]}
            own.append((name,))
        ports.append(own)
        terms = [(0,), (2,)] if added or node.op == "aten.scatter.src" else []
    elif node.args[3] == 0:
        terms = [(0,)]
    if not added:
        held |= {"j"}
    return make(ports, [ports[0]], sizes, unsharded=held, terms=terms)


def index_select(node: Node, types: Types) -> Rule:
    """``a s! c, @j -> a j c``."""
    source, index = shapes_in(node, types)
    if not source or not index:
        return replicated(node, types, "it reads a single element")
    dim = int(node.args[1]) % len(source)
    names = letters(len(source))
    sizes = dict(zip(names, source, strict=True)) | {"j": index[0]}
    out: list[RuleDim] = [("j",) if i == dim else (n,) for i, n in enumerate(names)]
    return make([[(n,) for n in names], [("j",)]], [out], sizes, unsharded={names[dim]}, terms=[(0,)])


def index_add(node: Node, types: Types) -> Rule:
    """``a s! c, @j, a j c -> a s! c``; `index_copy` needs all of ``j``."""
    source = shapes_in(node, types)[0]
    if not source:
        return replicated(node, types, "it writes a single element")
    dim = int(node.args[1]) % len(source)
    names = letters(len(source))
    index = shapes_in(node, types)[1]
    sizes = dict(zip(names, source, strict=True)) | {"j": index[0] if index else 1}
    row: list[RuleDim] = [("j",) if i == dim else (n,) for i, n in enumerate(names)]
    port: list[RuleDim] = [("j",)] if index else []
    held = {names[dim]} if node.op == "aten.index_add.default" else {names[dim], "j"}
    return make(
        [[(n,) for n in names], port, row], [[(n,) for n in names]], sizes, unsharded=held, terms=[(0,), (2,)]
    )


def _places(
    node: Node, types: Types, source: tuple[int, ...]
) -> tuple[list[str], list[RuleDim], list[list[RuleDim]], dict[str, int], set[str]]:
    """Return, for advanced indexing: names of the source, dims of the result, index ports, sizes, unsharded letters."""
    given = [a if isinstance(a, Ref) else None for a in node.args[1]]
    given += [None] * (len(source) - len(given))
    shapes = [types[a.name].shape for a in given if a is not None]
    rank = max(map(len, shapes))
    full = tuple(
        max((s[i - rank + len(s)] for s in shapes if i >= rank - len(s)), default=1) for i in range(rank)
    )
    spots = letters(rank, stem="j")
    names = letters(len(source))
    sizes = dict(zip(names, source, strict=True)) | dict(zip(spots, full, strict=True))
    ports = [broadcast(s, spots, full) for s in shapes]
    taken = [i for i, a in enumerate(given) if a is not None]
    result: list[RuleDim] = [(names[i],) for i, a in enumerate(given) if a is None]
    together = taken == list(range(taken[0], taken[-1] + 1))
    at = taken[0] if together else 0
    result[at:at] = [(s,) for s in spots]
    return names, result, ports, sizes, {names[i] for i in taken}


def _masks(node: Node, types: Types) -> bool:
    return any(types[a.name].dtype in ("b8", "u8") for a in node.args[1] if isinstance(a, Ref))


def index(node: Node, types: Types) -> Rule:
    """``x[i, :, j]``: indexed dims stay unsharded; dims of the indices and the other dims are free."""
    source = shapes_in(node, types)[0]
    if _masks(node, types):
        return replicated(node, types, "the size of its result depends on a mask")
    names, result, ports, sizes, held = _places(node, types, source)
    return make([[(n,) for n in names], *ports], [result], sizes, unsharded=held, terms=[(0,)])


def index_put(node: Node, types: Types) -> Rule:
    """``x[i, :, j] = values``; where values are accumulated, dims of the indices may be sharded."""
    shapes = shapes_in(node, types)
    if _masks(node, types):
        return replicated(node, types, "the elements it writes depend on a mask")
    names, result, ports, sizes, held = _places(node, types, shapes[0])
    flat = [d[0] for d in result]
    values = broadcast(shapes[-1], flat, tuple(sizes[n] for n in flat))
    spots = {n for n in flat if n.startswith("j")}
    adds = bool(node.arg(3, "accumulate", False))
    dims: list[RuleDim] = [(n,) for n in names]
    # One value for many elements is not a sum over them: it would enter partial and be lost.
    spread = not spots <= {x for d in values for x in d}
    return make(
        [dims, *ports, values], [dims], sizes, unsharded=held if adds and not spread else held | spots,
        terms=[(0,), (len(shapes) - 1,)],
    )  # fmt: skip


def index_fill(node: Node, types: Types) -> Rule:
    """``a s! c, @j! ~> a s! c``."""
    source, places = shapes_in(node, types)[:2]
    dim = int(node.args[1]) % max(len(source), 1)
    names = letters(len(source))
    sizes = dict(zip(names, source, strict=True)) | {"j": places[0] if places else 1}
    port = [(n,) for n in names]
    return make([port, [("j",)] if places else []], [port], sizes, unsharded={names[dim], "j"})


def embedding(node: Node, types: Types) -> Rule:
    """``v h, @... -> ... h``: the rows of other ranks give zeros, so a sharded table leaves the result partial."""
    if node.arg(3, "scale_grad_by_freq", False):
        return replicated(node, types, "its gradient is scaled by how often a row is read")
    rows = rows_by_column(node)
    if len(rows) > 1:
        return _by_column(node, types, rows)
    return line(node, types, "v h, @... -> ... h")


def embedding_bag(node: Node, types: Types) -> Rule:
    """``@b s!, v! h (, b s!) -> b h``: a row of ids each; a maximum is not linear and remembers its rows."""
    if node.kwarg("mode") == "max":
        return line(node, types, "@b s!, v! h! ~> b h!")
    return line(node, types, "@b s!, v! h (, b s!) -> b h")


def rows_by_column(node: Node) -> tuple[int, ...]:
    """Return the rows of a table for each column of its indices, as given to `mw.manual_split`; empty without it."""
    word = next((m for m in node.marks if m.startswith(ROWS_MARK)), "")
    return tuple(int(n) for n in word.removeprefix(ROWS_MARK).split(",")) if word else ()


def _by_column(node: Node, types: Types, rows: tuple[int, ...]) -> Rule:
    """``v h, ... c -> ... c h`` where v is sharded as c is: each column of indices reads its own rows."""
    table, ids = shapes_in(node, types)
    if sum(rows) != table[0] or not ids or len(rows) != ids[-1]:
        raise StrategyError(
            f"mw.manual_split gives {len(rows)} columns of {' + '.join(map(str, rows))} rows",
            why=f"the table has {table[0]} rows, the indices are {list(ids)}: their last dim counts the columns",
            hint="give one number for each column; their sum is the number of rows",
        )
    lead = [(f"a{i}",) for i in range(len(ids) - 1)]
    sizes = {
        "v": table[0],
        "h": table[1],
        "c": ids[-1],
        **{name: n for (name,), n in zip(lead, ids, strict=False)},
    }
    ports = [[("v",), ("h",)], [*lead, ("c",)]]
    result = [*lead, ("c",), ("h",)]
    terms = [(0,)]
    return make(ports, [result], sizes, unsharded={"v"}, outer={"c"}, follows={"v": ("c", rows)}, terms=terms)


def histc(node: Node, types: Types) -> Rule:
    """``... ~> b!``: the counts of shards add up, if the bounds are given."""
    low, high = node.arg(2, "min", 0), node.arg(3, "max", 0)
    if low == high:
        return replicated(node, types, "its bounds are those of the values")
    return line(node, types, "... ~> b!")


INDEX: dict[str, Special] = {
    "aten.embedding.default": embedding,
    "aten.histc.default": histc,
    "meshwright.embedding_bag": embedding_bag,
    "aten.gather.default": gather,
    "aten.scatter.src": scatter,
    "aten.scatter.value": scatter,
    "aten.scatter_add.default": scatter,
    "aten.scatter_reduce.two": scatter,
    "aten.index_select.default": index_select,
    "aten.index_add.default": index_add,
    "aten.index_copy.default": index_add,
    "aten.index_fill.int_Scalar": index_fill,
    "aten.index.Tensor": index,
    "aten.index_put.default": index_put,
}

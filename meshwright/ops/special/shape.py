"""Views, slices, splits and creations: operators whose rule depends on sizes among their arguments."""

from __future__ import annotations

from meshwright.core.graph import Node
from meshwright.ops.rule import Rule, RuleDim
from meshwright.ops.special.build import (
    SMALLEST_PART,
    Special,
    Types,
    letters,
    line,
    make,
    replicated,
    shapes_in,
    text_of,
)

SHORT = "its parts are too short to shard"


def view(node: Node, types: Types) -> Rule:
    """The same elements in the same order. The analysis of the graph determines its letters, if there are elements."""
    if 0 in node.outputs[0].shape:
        return replicated(node, types, "it has no elements")
    return Rule(((),), ((),), {}, terms=((0,),), flattened=True)


def permute(node: Node, types: Types) -> Rule:
    """``a0 a1 a2 -> a2 a0 a1``."""
    rank = len(node.outputs[0].shape)
    names = letters(rank)
    order: tuple[int, ...] = node.args[1]
    return line(node, types, f"{text_of(names)} -> {text_of(names[d % rank] for d in order)}")


def transpose(node: Node, types: Types) -> Rule:
    """Two dims exchanged (`transpose.int`, `t`)."""
    rank = len(node.outputs[0].shape)
    swapped = letters(rank)
    if rank >= 2:
        i, j = (int(d) % rank for d in node.args[1:3]) if len(node.args) > 2 else (0, 1)
        swapped[i], swapped[j] = swapped[j], swapped[i]
    return line(node, types, f"{text_of(letters(rank))} -> {text_of(swapped)}")


def expand(node: Node, types: Types) -> Rule:
    """New and repeated dims have letters that only the output has: their gradient is summed."""
    (source,), target = shapes_in(node, types), node.outputs[0].shape
    names = letters(len(target))
    offset = len(target) - len(source)
    inputs: list[RuleDim] = [
        (names[offset + i],) if n == target[offset + i] else () for i, n in enumerate(source)
    ]
    return make([inputs], [[(n,) for n in names]], dict(zip(names, target, strict=True)), terms=[(0,)])


def pieces(node: Node, types: Types, dim: int, sizes: list[int], taken: list[int]) -> Rule:
    """A dim split into parts, of which some are results. Short parts leave the dim unsharded."""
    source = shapes_in(node, types)[0]
    names = letters(len(source))
    known = {n: s for i, (n, s) in enumerate(zip(names, source, strict=True)) if i != dim}
    held: tuple[str, ...] = ()
    opened: RuleDim = ("s",)
    parts = [f"s.{t}" for t in taken]
    if len(set(sizes)) == 1 and len(taken) == len(sizes):
        known |= {"c": len(sizes), "x": sizes[0]}
        opened, held, parts = ("c", "x"), ("c",), ["x"] * len(sizes)
    elif min(sizes) >= (SMALLEST_PART if len(taken) < len(sizes) else 2):
        known |= {"s": source[dim], **{f"s.{i}": n for i, n in enumerate(sizes)}}
    else:
        parts = [f"t{t}" for t in taken]
        known |= {"s": source[dim], **{f"t{t}": sizes[t] for t in taken}}
        held = ("s", *parts)

    def port(middle: RuleDim) -> list[RuleDim]:
        return [middle if i == dim else (n,) for i, n in enumerate(names)]

    why = SHORT if "s" in held else ""
    return make([port(opened)], [port((p,)) for p in parts], known, unsharded=held, terms=[(0,)], why=why)


def slice_(node: Node, types: Types) -> Rule:
    """``x[..., start:end:step, ...]``: the dim is ``{before | kept | after}``."""
    source = shapes_in(node, types)[0]
    start, end, step, dim = slice_bounds(node, source)
    names = letters(len(source))
    if (start, end, step) == (0, source[dim], 1):
        return line(node, types, f"{text_of(names)} -> {text_of(names)}")
    if step != 1 or end <= start:
        marked, out = letters(len(source), {dim: "!"}), letters(len(source))
        out[dim] = "taken!"
        return line(node, types, f"{text_of(marked)} -> {text_of(out)}")
    sizes = [start, end - start, source[dim] - end]
    taken = 1 if start else 0
    return pieces(node, types, dim, [s for s in sizes if s], [taken])


def slice_bounds(node: Node, source: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return start, end, step and dim, with defaults, negative and overlong bounds resolved."""
    dim = int(node.arg(1, "dim", 0)) % len(source)
    size = source[dim]

    def place(value: int | None, default: int) -> int:
        number = default if value is None else int(value)
        return min(max(number + size if number < 0 else number, 0), size)

    return place(node.arg(2, "start"), 0), place(node.arg(3, "end"), size), int(node.arg(4, "step", 1)), dim


def split_with_sizes(node: Node, types: Types) -> Rule:
    """All pieces: equal ones make the dim ``(c! x)``, others a concatenation."""
    source = shapes_in(node, types)[0]
    dim = int(node.arg(2, "dim", 0)) % len(source)
    sizes = [t.shape[dim] for t in node.outputs]
    return pieces(node, types, dim, sizes, list(range(len(sizes))))


def unbind(node: Node, types: Types) -> Rule:
    """``a0 c! a2 -> a0 a2`` for each result."""
    source = shapes_in(node, types)[0]
    dim = int(node.arg(1, "dim", 0)) % len(source)
    kept = text_of(n for i, n in enumerate(letters(len(source))) if i != dim)
    outputs = ", ".join([kept] * len(node.outputs))
    return line(node, types, f"{text_of(letters(len(source), {dim: '!'}))} -> {outputs}")


def cat(node: Node, types: Types) -> Rule:
    """Pieces joined: the dim is a concatenation of theirs."""
    sources, target = shapes_in(node, types), node.outputs[0].shape
    dim = int(node.arg(1, "dim", 0)) % len(target)
    names = letters(len(target))
    short = min(s[dim] for s in sources) < SMALLEST_PART
    parts = [f"{'t' if short else 's.'}{i}" for i in range(len(sources))]
    sizes = {n: s for i, (n, s) in enumerate(zip(names, target, strict=True)) if i != dim}
    sizes |= {"s": target[dim]} | {p: s[dim] for p, s in zip(parts, sources, strict=True)}

    def port(middle: RuleDim) -> list[RuleDim]:
        return [middle if i == dim else (n,) for i, n in enumerate(names)]

    held = ("s", *parts) if short else ()
    terms = [(i,) for i in range(len(sources))]
    return make(
        map(port, [(p,) for p in parts]),
        [port(("s",))],
        sizes,
        unsharded=held,
        terms=terms,
        why=SHORT if short else "",
    )


def stack(node: Node, types: Types) -> Rule:
    """A new dim, unsharded."""
    target = node.outputs[0].shape
    dim = int(node.arg(1, "dim", 0)) % len(target)
    kept = text_of(n for i, n in enumerate(letters(len(target))) if i != dim)
    return line(
        node, types, f"{' + '.join([kept] * len(node.uses))} -> {text_of(letters(len(target), {dim: '!'}))}"
    )


def creation(node: Node, types: Types) -> Rule:
    """No tensor is read: any dim may be sharded."""
    shape = node.outputs[0].shape
    names = letters(len(shape))
    return make([[] for _ in node.uses], [[(n,) for n in names]], dict(zip(names, shape, strict=True)))


def rigid_creation(node: Node, types: Types) -> Rule:
    """No tensor is read, and the result depends on positions (`eye`)."""
    shape = node.outputs[0].shape
    names = letters(len(shape))
    return make([], [[(n,) for n in names]], dict(zip(names, shape, strict=True)), unsharded=names)


def pad(node: Node, types: Types) -> Rule:
    """Padded dims stay unsharded. Padding with a constant other than zero is not linear."""
    source, pads = shapes_in(node, types)[0], node.args[1]
    touched = {len(source) - 1 - i // 2 for i, n in enumerate(pads) if n}
    before = letters(len(source), dict.fromkeys(touched, "!"))
    after = [f"padded{i}!" if i in touched else n for i, n in enumerate(letters(len(source)))]
    named = node.op == "aten.pad.default"
    constant = not named or node.arg(2, "mode", "constant") == "constant"
    value = node.arg(3 if named else 2, "value")
    arrow = "~>" if constant and value else "->"
    return line(node, types, f"{text_of(before)} {arrow} {text_of(after)}")


def repeat(node: Node, types: Types) -> Rule:
    """``x -> (r! x)`` for each repeated dim. New dims stay unsharded."""
    source, times = shapes_in(node, types)[0], node.args[1]
    offset = len(times) - len(source)
    names = letters(len(source))
    out = [
        f"n{i}!" if i < offset else (f"(r{i}! {names[i - offset]})" if t > 1 else names[i - offset])
        for i, t in enumerate(times)
    ]
    return line(node, types, f"{text_of(names)} -> {text_of(out)}")


def repeat_interleave(node: Node, types: Types) -> Rule:
    """``x -> (x r!)``. Without a dim the tensor is flattened and stays unsharded."""
    source = shapes_in(node, types)[0]
    dim = node.arg(2, "dim")
    if dim is None:
        return line(node, types, f"{text_of(f'a{i}!' for i in range(len(source)))} -> all!")
    names = letters(len(source))
    out = [f"({n} r!)" if i == dim % len(source) else n for i, n in enumerate(names)]
    return line(node, types, f"{text_of(names)} -> {text_of(out)}")


def im2col(node: Node, types: Types) -> Rule:
    """Patches as columns: batch and channels may be sharded."""
    source = shapes_in(node, types)[0]
    batch = "n " if len(source) == 4 else ""
    return line(node, types, f"{batch}c h! w! -> {batch}(c k!) l!")


def col2im(node: Node, types: Types) -> Rule:
    """Columns summed back to an image."""
    source = shapes_in(node, types)[0]
    batch = "n " if len(source) == 3 else ""
    return line(node, types, f"{batch}(c k!) l! -> {batch}c h! w!")


def unfold(node: Node, types: Types) -> Rule:
    """``a0 a1! -> a0 y! z!``: windows along one dim, whose elements come last."""
    source = shapes_in(node, types)[0]
    if not source:
        return line(node, types, " -> z!")
    dim = int(node.args[1]) % len(source)
    after = letters(len(source))
    after[dim] = "y!"
    return line(node, types, f"{text_of(letters(len(source), {dim: '!'}))} -> {text_of([*after, 'z!'])}")


def diag_embed(node: Node, types: Types) -> Rule:
    """``a0 d! -> a0 x! y!``: the last dim becomes the diagonal of two, which may stand anywhere."""
    source, rank = shapes_in(node, types)[0], len(node.outputs[0].shape)
    first, second = (int(node.arg(2 + i, f"dim{i + 1}", i - 2)) % rank for i in (0, 1))
    names = letters(len(source) - 1)
    kept = iter(names)
    after = ["x!" if d == first else "y!" if d == second else next(kept) for d in range(rank)]
    return line(node, types, f"{text_of([*names, 'd!'])} -> {text_of(after)}")


def diagonal(node: Node, types: Types) -> Rule:
    """``a0 x! y! -> a0 d!``: the diagonal of two dims comes last."""
    source = shapes_in(node, types)[0]
    taken = {int(node.arg(2 + i, f"dim{i + 1}", i)) % len(source) for i in (0, 1)}
    names = letters(len(source))
    kept = [n for i, n in enumerate(names) if i not in taken]
    before = letters(len(source), dict.fromkeys(taken, "!"))
    return line(node, types, f"{text_of(before)} -> {text_of([*kept, 'd!'])}")


SHAPE: dict[str, Special] = {
    "aten.view.default": view,
    "aten.reshape.default": view,
    "aten.permute.default": permute,
    "aten.transpose.int": transpose,
    "aten.t.default": transpose,
    "aten.expand.default": expand,
    "aten.slice.Tensor": slice_,
    "aten.split_with_sizes.default": split_with_sizes,
    "aten.unbind.int": unbind,
    "aten.cat.default": cat,
    "aten.stack.default": stack,
    "aten.pad.default": pad,
    "aten.constant_pad_nd.default": pad,
    "aten.repeat.default": repeat,
    "aten.repeat_interleave.self_int": repeat_interleave,
    "aten.unfold.default": unfold,
    "aten.diag_embed.default": diag_embed,
    "aten.diagonal.default": diagonal,
    "aten.im2col.default": im2col,
    "aten.col2im.default": col2im,
    "aten.full.default": creation,
    "aten.arange.default": creation,
    "aten.arange.start": creation,
    "aten.arange.start_step": creation,
    **{f"aten.{n}": creation for n in ("rand.default", "randn.default", "randint.default", "randint.low")},
    "aten.eye.default": rigid_creation,
    "aten.eye.m": rigid_creation,
    "aten.linspace.default": rigid_creation,
    "aten.randperm.default": rigid_creation,
}

"""Budgets of the searches: every tuning constant of the modes that search, and where they may stop.

There is a budget for each kind of search. ``dynamic_programming`` reads `SOLVE`, `SPACE` and `MEMORY`;
``recursive_programming`` also reads `RECURSION`; ``auto`` reads all of them. No constant changes what is legal or what
a plan costs: they only limit the effort of a search. Physics (rates, sizes, floating-point tolerances) stays beside the
formulas that use it.
"""

from __future__ import annotations

from dataclasses import dataclass

Prices = tuple[tuple[float, float], ...]
"""Prices of a byte of states and of a byte of activations, in steps that all bytes of the quickest choice cost."""


@dataclass(frozen=True)
class SolveBudget:
    """One problem of pairs (`search/solve`), without and with limits on its bytes."""

    # Sums of table entries that an exact elimination may take: about seven seconds on one core.
    work: float = 4e9
    # Bytes of all tables of one elimination, so that a search fits beside the model on a laptop.
    table_bytes: float = 400e6
    # Sums that take about 0.05 s: a problem that small is eliminated at once, without trying a part of it first.
    modest_work: float = 3e7
    # Sums that take as long as the NumPy calls for one variable in a round of sweeps.
    call_work: float = 1e5
    # Rounds of sweeps, and of single changes to a choice: a guard, since both end once nothing is gained.
    rounds: int = 60
    # A round that closes less of the gap than this is the last: elimination closes the rest sooner.
    least_progress: float = 0.05
    # States of a variable among which a first good choice is looked for; the largest number that the work allows.
    few: tuple[int, ...] = (64, 32, 16, 8)
    # Rounds after which that is done: early, since a good choice prunes the rounds that follow.
    few_after: tuple[int, ...] = (1, 3)
    # Rounds between two tries to eliminate the states that look best: each may cost as much as a round.
    rounds_between_tries: int = 3
    # Bisections of the level below which states are eliminated: within 1/256 of the gap.
    bisections: int = 8
    # Of the entries of all pairs: with more than that left, a smaller copy of the problem does not pay.
    worth_copying: float = 0.7

    # Unlimited solves of one search under limits, a fraction of a second each.
    limited_solves: int = 40
    # Times that, as long as nothing was accepted: no answer is worse than a late one.
    patience: int = 3
    # Of the price: a gap to the bound that is not closed further. The model of the cluster is coarser than that.
    enough: float = 2e-3
    # Solves of one part before it is split again: its multipliers have mostly settled by then.
    part_solves: int = 8
    # Choices that are made to fit by single changes, and rounds of mixing them.
    repairs: int = 6
    # Share of the way to where the planes of the dual ascent point: a full step oscillates.
    step: float = 0.7
    # Choices that a caller's own test of memory is asked about, where it simulates them.
    accepted_calls: int = 300
    # Times that limits are tightened where that test refuses what fits by its bytes.
    tightenings: int = 8
    # Of the limits: the first step where that test does not say by how much something is over.
    first_tightening: float = 0.02
    # Pivots of the linear program behind the multipliers: a guard against going in circles.
    pivots: int = 500


@dataclass(frozen=True)
class SpaceBudget:
    """The spaces that are searched: how large, and what is left out before they are priced."""

    # Axes whose product states are searched: with more, the states of a node are too many to tabulate.
    product_axes: int = 4
    # Options of a node on one axis; more are dropped, smallest factors first.
    options: int = 12
    # Pairs of states from which a space is pruned before it is priced: with fewer, pricing all is quicker.
    prune_pairs: int = 10_000_000
    # Sweeps of that pruning; they gain little after the first few.
    prune_rounds: int = 4
    # Of all pairs: once no more are left, the sweeps end.
    prune_share: float = 0.25
    # States of a variable that stay whatever they cost: the next best is reported from these.
    prune_keeps: int = 16
    # Of the step: what may be computed before the reader of a parameter for its chain to bound the step.
    early_share: float = 0.15
    # Parameters whose chains are tried, the largest first.
    chain_entries: int = 3


@dataclass(frozen=True)
class MemoryBudget:
    """Searches under a limit of memory, and what is tried where nothing fits."""

    # Times that limits are tightened by what a simulation saw over them: each costs one search.
    tightenings: int = 8
    # Sums of one solve where the search is one of several: what is beyond them seldom changes the first digits.
    work: float = 3e7
    # Doublings of the price of a byte until something fits: from 1/8 of a step for a full device to 256 of them.
    doublings: int = 12
    # Of these, how many are tried one after the other, before the last.
    low_doublings: int = 2
    # Halvings back: within 1/16 of the last doubling.
    halvings: int = 4
    # Of the bound: what is that near is not searched further. Simulations differ from sums by more.
    near: float = 0.01
    # Steps that the bytes of the quickest choice are priced at, the most first. The choice with the least sums does not
    # always have the lowest peak: buffers of collectives and what lives for a moment are not in the sums.
    byte_prices: tuple[float, ...] = (float(1 << 30), 512.0, 64.0, 8.0, 2.0, 0.5)
    # Moves of one operator to another sharding, from the choice with the lowest peak on.
    moves: int = 6
    # Other shardings of an operator that are looked at in one move.
    ways: int = 16
    # Nodes of all programs that are simulated for these moves, and copies of a layer in the two programs of a folded
    # model. Fewer programs than the least are none.
    moved_nodes: int = 1500
    copies: int = 6
    least_moved: int = 4
    # Of the limit: sums that leave more room need no simulation before a search. Of the lowest peak of the choices of
    # least bytes: how far below it a search may still come.
    little_room: float = 0.5
    within_reach: float = 0.93
    # Parts of the batch that a refusal tries, and how many it names.
    batch_parts: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    batch_parts_named: int = 3
    # Nodes of all smaller batches that are captured and planned for a refusal, about two seconds.
    batch_nodes: int = 2000
    # Of all parameters: embedding tables that are less are not worth a search with them on the host.
    tables_share: float = 0.1


@dataclass(frozen=True)
class RecursionBudget:
    """``recursive_programming``: a few axes at a time, then refining sweeps."""

    # Neighbouring axes of one link that are solved together: eight options a node, which tables hold easily.
    axes_together: int = 3
    # Refining sweeps at most.
    sweeps: int = 4
    # Of the price: a sweep that gains less is the last.
    least_gain: float = 5e-4
    # Sums of a joint sweep, about a third of a second: it must be better, not the best.
    sweep_work: float = 2e8
    # Nodes up to which one space is made node by node; it is quicker than arrays there.
    single_space_nodes: int = 200
    # Nodes above which only arrays are quick enough, however few nodes are of one kind.
    arrays_nodes: int = 2000
    # Between the two: nodes of a kind, on average, from which arrays are quicker. Unlike layers have two or three.
    nodes_of_a_kind: int = 10
    # Nodes above which arrays are refined turn by turn alone: axis by axis would take minutes.
    turns_only_nodes: int = 2000


@dataclass(frozen=True)
class AutoBudget:
    """``auto`` under given techniques: recipes, optima and a bound of the step."""

    # Weights of computing against what can hide beside it, as long as there is a gap to the bound.
    alphas: tuple[float, ...] = (0.5, 0.3)
    # The innermost axes that a recipe leaves to tensor parallel, at most: eight ranks.
    recipe_axes: int = 3
    # Candidates that are evaluated in full, about two seconds each for the largest models.
    evaluated_in_full: int = 4
    # Nodes of a model whose full program is simulated for the answer: about two seconds.
    full_nodes: int = 8000
    # Of the bound of the step: beside a candidate that near to it no other is evaluated.
    close: float = 0.003
    # How far an evaluation of a few layers may be from one of all of them.
    doubt: float = 0.005
    # Of the best step: where the optimum of fewer ranks is that much later, no others are looked at.
    far: float = 0.1
    # Solves for one bound of the step under a limit of memory.
    bound_solves: int = 12
    # Weights of computing (none: the plain sum), each with a price on all bytes as a share of the step.
    lighter: tuple[tuple[float | None, float], ...] = (
        (0.5, 0.03),
        (0.5, 0.06),
        (0.5, 0.12),
        (0.3, 0.06),
        (0.3, 0.12),
        (None, 0.05),
    )
    # Smaller limits whose optima are looked at, by how much each is below the bytes of the last optimum, and how many
    # choices of one of them are simulated.
    smaller_limits: int = 10
    smaller_by: float = 0.05
    smaller_simulations: int = 7
    # Nodes × axes up to which all these are looked at: beyond, they would take most of the search.
    lighter_size: int = 400
    # Of the step: where a recursion without a limit saves no more, a large space gets none under one.
    recursion_worth: float = 0.05


@dataclass(frozen=True)
class TechniquesBudget:
    """``auto`` over techniques (`search/joint`): recompute, micro-batches, offload, slices, interleaving."""

    # Simulations of choices under techniques that fit; they are ordered by estimates, so the best comes early.
    simulations: int = 20
    # Of those that do not fit, and twice as many where one of them nearly does: the quickest fit least.
    over_limit: int = 20
    # Simulations, one after the other, that fit and are no quicker than the best so far, before they end.
    patience: int = 5
    # Simulations of one stage in all, for models of more operators than these: each takes half a second and more.
    large_nodes: int = 1000
    large_simulations: int = 36
    # Of the limit: a peak below it, known from a few layers, needs no evaluation in full until the end.
    sure_share: float = 0.97
    # Of the step: what interleaving, or a technique of little use, must save to be taken, and what a choice must be
    # expected to save to be simulated.
    worth: float = 0.01
    # Techniques that the first answer is tried with where computing layers again is not enough.
    first_tries: int = 4
    # Searches under techniques where nothing else fits, and the simulations × nodes × axes that they may take together:
    # on thousands of ranks one would take longer than all before it.
    searches: int = 6
    search_work: int = 25_000
    # Simulations that one such search takes.
    search_simulations: int = 26
    # Numbers of micro-batches, one after the other, that take no less memory than more of them, before it ends.
    worse_in_a_row: int = 2
    # Solves of the search that places shardings and storage under the best techniques once more.
    again_solves: int = 16
    # Of a step with techniques: where choices without them take more, no better ones without them are searched. On
    # large clusters, where that takes longest, `worth` more is enough.
    slow: float = 1.1
    # Nodes × axes up to which exact searches go before the front: there they are quick, and more memory never makes
    # their plans slower.
    small_size: int = 150
    # Of the bound: how near to it a choice of the front without techniques needs no exact search.
    near: float = 0.05
    # Moves to a quicker neighbour at the end.
    moves: int = 4
    # Of the step: with less communication exposed, interleaving and prefetch are not tried.
    exposed: float = 0.05
    # Groups of weights that are gathered ahead of their use, at most.
    prefetch: int = 4
    # Choices whose recompute is tried in fewer layers, as they may be the quickest then.
    partly: int = 2
    # Layers, from the estimated number on, with which recompute in fewer layers is tried.
    layer_tries: int = 3
    # Weighings of ``recompute`` given as a number of bytes: neighbours share what lies between them.
    recompute_tries: int = 12
    # Simulations for the next best value of one technique.
    neighbour_simulations: int = 3
    # Of a step: what differs less is as quick, and the plainer is taken.
    as_quick: float = 1e-3
    # Micro-batches at most, whatever the batch.
    micro_batches: int = 4096

    # Of a front, what its choices are optimal for: of all shardings, of recipes,
    front_prices: Prices = ((0.0, 0.0), (0.2, 0.0), (2.0, 0.0), (2.0, 0.5), (0.0, 2.0), (64.0, 64.0))
    recipe_prices: Prices = ((0.0, 0.0), (2.0, 0.0))
    # Entries of all pairs beyond which each solve takes seconds, and what the choices of such a front are optimal for.
    front_pairs: float = 2e7
    few_prices: Prices = ((0.0, 0.0), (2.0, 0.5), (64.0, 64.0))
    # Sums that one elimination for a front may take: its choices are simulated, and so need not be optimal to the last
    # digit. On models of today they are within 1e-3 of the optimum, seven times sooner.
    front_work: float = 3e7
    # Of its bound: a choice that is further from it is searched with more work. Of forty for Llama-405B on 16,384 ranks
    # one is 1.8 % from the optimum, and a step without it is 11 % slower.
    front_gap: float = 0.01
    front_more_work: float = 3e8
    # The same for the bound of the answer, which then is lower than the optimum, and still a bound.
    bound_work: float = 1e8
    # of many micro-batches, whose gradients are accumulated, and where half of what is sent hides.
    many_prices: Prices = ((0.0, 0.0), (2.0, 0.0))
    hidden_prices: Prices = ((0.0, 0.0), (2.0, 0.0))
    # Micro-batches of which each gathers what is stored in shards: for a choice beside those for a full batch.
    many: int = 16
    # Weight of computing against what can hide beside it.
    alpha: float = 0.5
    # Times the limit: an estimated peak up to it is still simulated, and a simulated one up to it is timed.
    slack: float = 1.1
    # The same of its sums, which seldom are above a simulation.
    sums_slack: float = 1.02
    # Of the bytes without a technique: what saves less is not worth a simulation.
    worth_saving: float = 0.99
    # Of seconds: candidates of different spaces that differ by no more count as one.
    same_candidate: float = 2e-4
    # Of the seconds and bytes of two simulations under the same techniques: what differs less is equal.
    alike: float = 1e-3
    # Of the least bytes that sums of others missed under other techniques: what those of a candidate miss at least.
    missed_share: float = 0.5
    # Candidates simulated under the same techniques from which the lateness of others is estimated, and from how many
    # on it decides which is looked at first.
    late_samples: int = 3
    late_order: int = 2
    # Of the step of a candidate: by how much one that nearly is it may be quicker.
    sibling_doubt: float = 0.005


@dataclass(frozen=True)
class StagesBudget:
    """``auto`` over pipelines (`search/pipeline`)."""

    # Configurations that are simulated; they are ordered by estimates, so the best comes early.
    simulations: int = 20
    # Of these, over the same levels, one after the other, that are no quicker than the best so far, before no more of
    # them are looked at; and before any of them was quicker. Those over other levels may be: sums leave out for how
    # long a slow link is waited for.
    patience: int = 5
    patience_at_first: int = 2
    # Simulations of a schedule after which the least that they took, over what sums say, is expected of its others; and
    # times the limit: what is expected to take more is not simulated.
    ratios: int = 3
    ratio_slack: float = 1.02
    # Pipelines that are planned and predicted in full, once one of them or one stage fits.
    planned: int = 3
    # The same for models of few operators, whose pipelines are planned in a moment.
    planned_of_small: int = 9
    small_nodes: int = 600
    # Of the step: what stages must save over one stage, which is simpler to run.
    worth: float = 0.02
    # Of the bound: a plan in one stage that is nearer is not compared with stages.
    near: float = 0.1
    # What the choices of a front are optimal for: gradients are accumulated, so states weigh more.
    prices: Prices = ((0.0, 0.0), (0.05, 0.0), (0.5, 0.0), (2.0, 0.5))
    # Of a stage's forward: what a message takes at least where `gpipe` is looked at.
    heavy_message: float = 0.1
    # Chains of shardings that are solved for one bound, the sums that each elimination for it may take, and of the
    # best step how near a bound needs no more.
    bound_solves: int = 24
    bound_work: float = 3e7
    bound_close: float = 0.02
    # Actions of a schedule whose order comes of a race: with more it takes minutes to find.
    raced_actions: int = 1 << 10
    # Searches, each within what the one before it was over, until a pipeline fits.
    smaller_limits: int = 3
    # Splits into stages that are looked at for the memory they need.
    splits: int = 4
    # Of the room: stages whose sums are below it fit without a look at their program.
    far_below: float = 0.5
    # Limits that are planned with before a refusal names one, and by how much each is larger than the last at least.
    limits: int = 6
    limit_step: float = 0.03


SOLVE = SolveBudget()
SPACE = SpaceBudget()
MEMORY = MemoryBudget()
RECURSION = RecursionBudget()
AUTO = AutoBudget()
TECHNIQUES = TechniquesBudget()
STAGES = StagesBudget()

__all__ = ["AUTO", "MEMORY", "RECURSION", "SOLVE", "SPACE", "STAGES", "TECHNIQUES", "Prices"]

"""The moments of a rank's step at which it may have most microbatches in flight, of a schedule that is as short as may be."""

from collections.abc import Callable, Sequence

from framework.parallel.pipeline.lower import LiveMoment, live_moments, lower
from framework.parallel.pipeline.schedules import make_schedule
from framework.parallel.pipeline.simulate import Costs, unit_costs


def representative(schedule: str, pp: int, accumulation: int) -> int:
    """The fewest microbatches, of those that are known to do, with which a rank has as many in flight at once as with so many."""
    if schedule == "gpipe":
        return accumulation
    if schedule != "interleaved":
        # From here on each more only repeats: of a V both halves have to be full.
        return min(accumulation, {"zbv": 2 * pp, "dualpipe_v": 2 * pp + 1}.get(schedule, pp + 1))
    # Groups of pp and, first, so many of pp + 1 as the division leaves over: beyond them the same comes again.
    groups, longer = divmod(accumulation, pp)
    most = max(4, longer + 2) if longer else 3
    return most * pp + longer if groups > most else accumulation


def moments_of(schedule: str, pp: int, virtual: int, accumulation: int) -> list[list[LiveMoment]]:
    """Of each rank the moments at which it may have most: those at which no other has as much of each stage."""
    return list(map(make_moments(schedule, pp, virtual, accumulation, unit_costs(pp * virtual)), range(pp)))


def make_moments(
    schedule: str, pp: int, virtual: int, accumulation: int, costs: Costs
) -> Callable[[int], list[LiveMoment]]:
    """What makes those of a rank. costs: of each stage, by which messages are ordered."""
    few = min(accumulation, 4 * pp) if schedule == "gpipe" else representative(schedule, pp, accumulation)
    lowered = lower(make_schedule(schedule, pp, few, virtual), costs)

    def make(rank: int) -> list[LiveMoment]:
        own = _undominated(live_moments(lowered, rank))
        if few == accumulation or schedule != "gpipe":
            return own
        # All are in flight at once: with each one more there is one more of them, and one more that was sent.
        return [_with_more(each, accumulation - few, rank < pp - 1) for each in own if each.live[0][1] == few]

    return make


def _with_more(moment: LiveMoment, count: int, sends: bool) -> LiveMoment:
    ((stage, whole, waiting),) = moment.live
    between = moment.between + count * (moment.is_forward and sends)
    return moment._replace(live=((stage, whole + count, waiting),), between=between)


def _undominated(moments: Sequence[LiveMoment]) -> list[LiveMoment]:
    kept: dict[tuple[bool, int], list[LiveMoment]] = {}
    for each in sorted(moments, key=lambda each: -sum(whole + left for _, whole, left in each.live)):
        others = kept.setdefault((each.is_forward, each.stage), [])
        if not any(_has_as_much(other, each) for other in others):
            others.append(each)
    return [each for group in kept.values() for each in group]


def _has_as_much(one: LiveMoment, other: LiveMoment) -> bool:
    """A microbatch in flight keeps its hidden states at least, so it stands for one between stages as well."""
    pairs = list(zip(one.live, other.live, strict=True))
    more = sum(a[1] - b[1] for a, b in pairs)
    return one.between + more >= other.between and all(a[1] >= b[1] and a[2] >= b[2] for a, b in pairs)

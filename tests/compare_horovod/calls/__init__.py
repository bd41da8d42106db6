"""The calls that are compared, by group. One line in a table is one more."""

from tests.compare_horovod.calls import collectives, optimizer, process_sets, ranks, state
from tests.compare_horovod.calls.call import Group

__all__ = ["GROUPS"]

GROUPS = {
    group.name: group
    for group in (
        Group("types", collectives.TYPES),
        Group("arguments", collectives.ARGUMENTS),
        Group("disagreements", ranks.DISAGREEMENTS, sizes=(2, 4)),
        Group("process sets", process_sets.CALLS, sizes=(2, 4)),
        Group("state", state.CALLS),
        Group("optimizer", optimizer.CALLS),
        Group("join", ranks.JOIN),
        Group("after shutdown", ranks.AFTER_SHUTDOWN, sizes=(1, 2), after_shutdown=True),
    )
}

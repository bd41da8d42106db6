"""The calls that are compared, by group. One line in a table is one more."""

from tests.compare_horovod.calls import afterwards as after
from tests.compare_horovod.calls import (
    arguments,
    disagreements,
    gradients,
    joining,
    optimizer,
    process_sets,
    state,
    types,
)
from tests.compare_horovod.calls.call import Group

__all__ = ["GROUPS"]

GROUPS = {
    group.name: group
    for group in (
        Group("types", types.CALLS),
        Group("arguments", {**arguments.CALLS, **gradients.CALLS, **arguments.LAST}),
        Group("disagreements", disagreements.CALLS, sizes=(2, 4)),
        Group("process sets", process_sets.CALLS, sizes=(2, 4)),
        Group("state", state.CALLS),
        Group("optimizer", optimizer.CALLS),
        Group("join", joining.CALLS),
        Group("after shutdown", after.CALLS, sizes=(1, 2), after_shutdown=True),
    )
}

"""The calls that are compared, by group. One line in a table is one more."""

from bench.surface.calls import afterwards as after
from bench.surface.calls import arguments, disagreements, gradients, joining, sets, state, types, wrapper
from bench.surface.calls.call import Group

__all__ = ["GROUPS"]

GROUPS = {
    group.name: group
    for group in (
        Group("types", types.CALLS),
        Group("arguments", {**arguments.CALLS, **gradients.CALLS, **arguments.LAST}),
        Group("disagreements", disagreements.CALLS, sizes=(2, 4)),
        Group("process sets", sets.CALLS, sizes=(2, 4)),
        Group("state", state.CALLS),
        Group("optimizer", wrapper.CALLS),
        Group("join", joining.CALLS),
        Group("after shutdown", after.CALLS, sizes=(1, 2), after_shutdown=True),
    )
}

"""The TCP backend of comm_core. Importing it registers the backend and starts nothing."""

from collections.abc import Sequence

from comm_core._C import Communicator

class Listener:
    def __init__(self, host: str, backlog: int) -> None: ...
    @property
    def port(self) -> int: ...
    def close(self) -> None: ...

def connect(
    listeners: Sequence[Listener],
    rank: int,
    endpoints: Sequence[Sequence[tuple[str, int]]],
    num_sockets: int,
    apart: bool,
    secret: bytes,
    timeout: float,
    silence: float | None,
) -> Communicator: ...

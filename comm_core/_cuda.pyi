"""comm_core's CUDA kernels. Importing it loads nothing."""

class KernelImage:
    def __init__(self, cuda: str, device: int, image: bytes) -> None: ...
    def launch(
        self,
        name: str,
        *,
        blocks: int,
        threads: int,
        source: int,
        target: int,
        count: int,
        scale: float,
        stream: int,
    ) -> None: ...

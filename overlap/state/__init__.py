"""The optimizer's state: in pieces, whole, on all ranks, or moved between plans."""

"""One benchmark run: one model, one method, some workers."""

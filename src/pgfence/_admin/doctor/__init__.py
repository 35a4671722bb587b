"""The checks of `monitoring.doctor()` and `pgfence doctor`: pure functions on what was read of the server."""

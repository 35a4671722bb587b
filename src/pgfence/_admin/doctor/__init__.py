"""The checks of `monitoring.doctor()` and `pgfence doctor`: pure functions of the state that was read from the server."""

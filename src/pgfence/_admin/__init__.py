"""The implementation of `pgfence.schema` and `pgfence.monitoring`."""

"""The metrics and spans of `pgfence.telemetry`."""

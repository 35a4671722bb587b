"""The measurements of `pgfence.telemetry`."""

"""What `pgfence.telemetry` measures."""

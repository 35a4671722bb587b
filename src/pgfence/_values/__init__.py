"""What an idempotency key stores, and how it is compared."""

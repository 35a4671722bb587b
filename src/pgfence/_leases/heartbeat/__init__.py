"""What renews leases in the background."""

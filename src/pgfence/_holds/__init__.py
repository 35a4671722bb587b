"""Track which contenders of this process hold locks and which wait, without I/O."""

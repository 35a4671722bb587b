"""Track which contenders of this process hold locks and which of them wait, without I/O."""

"""All SQL that pgfence sends, one module per subject: statement texts, and functions from a Connection to plain values."""

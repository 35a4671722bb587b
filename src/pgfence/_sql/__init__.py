"""All SQL that pgfence sends, one module per subject: the texts, and functions that execute them and return plain values."""

"""The one class of error that a user can cause."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave: one sentence that names the key, the value and the remedy; exit code 2."""
